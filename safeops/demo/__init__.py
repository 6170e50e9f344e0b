"""The demo: one AMP training run on a real stereo pair, with the loss written the usual ways and with safeops.

`safeops demo` runs it. Nothing is imported here: the package itself needs torch alone, the demo needs `safeops[demo]`.
"""
