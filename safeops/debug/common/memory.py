"""Maps tensors to records of their storages, by identity."""

from safeops.core import private_torch


class Storage:
    """One storage: the op that wrote it last, and the rows of counts, the writes and the reads of its views."""

    __slots__ = ("weak", "writer", "leaf", "rows", "writes", "reads")

    def __init__(self, weak):
        self.weak, self.writer, self.leaf = weak, None, False  # leaf: True if it holds a parameter
        self.rows, self.writes, self.reads = {}, [], []


class Memory:
    """Maps a tensor to the Storage record of its memory. A weak reference reserves the storage's address, so that no
    other storage gets it, without keeping the bytes."""

    def __init__(self):
        self.storages = {}

    def of(self, x):
        untyped = x.untyped_storage()
        address = private_torch.identity(untyped)
        storage = self.storages.get(address)
        if storage is None:
            storage = self.storages[address] = Storage(private_torch.weak_reference(untyped))
        return storage

    def clear(self):
        storages, self.storages = self.storages, {}
        for storage in storages.values():
            private_torch.free_weak_reference(storage.weak)

    def __del__(self):
        self.clear()
