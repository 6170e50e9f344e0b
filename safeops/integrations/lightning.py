"""A callback for PyTorch Lightning's Trainer, which records its steps. Lightning is imported with the callback."""


def __getattr__(name):
    if name != "SafeopsRecorder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from safeops.integrations._lightning_recorder import SafeopsRecorder

    globals()[name] = SafeopsRecorder
    return SafeopsRecorder
