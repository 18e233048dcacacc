"""A slow file system of fsspec that can refuse, hang or fail at times, and counts its calls."""

import threading
import time

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Network(MemoryFileSystem):
    """Objects in memory, behind calls that take `delay` seconds."""

    protocol = "memory"
    cachable = False

    def __init__(self, delay=0.0):
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.delay, self.refuses, self.failing = delay, False, 0.0
        self.silent, self._speak = False, threading.Event()
        self.rng, self.lock = __import__("random").Random(1), threading.Lock()
        self.calls, self.now, self.peak = [], 0, 0

    def be_silent(self):
        """Let all calls hang from now on."""
        self._speak, self.silent = threading.Event(), True

    def speak(self):
        """Answer again, hanging calls too."""
        self.silent = False
        self._speak.set()

    def _call(self, name, function, *args, **options):
        with self.lock:
            self.calls.append(name)
            self.now += 1
            self.peak = max(self.peak, self.now)
            fails = self.rng.random() < self.failing
        try:
            if self.delay:
                time.sleep(self.delay)
            if self.silent:
                self._speak.wait(60.0)
            if self.refuses or fails:
                raise ConnectionError("no network")
            with self.lock:  # MemoryFileSystem is not safe for threads
                return function(*args, **options)
        finally:
            with self.lock:
                self.now -= 1

    def info(self, path, **options):
        return self._call("info", super().info, path, **options)

    def cat_file(self, path, *args, **options):
        return (
            self._call("cat", lambda: self.store[self._strip_protocol(path)].getvalue())
            if (self._strip_protocol(path) in self.store)
            else self._call("cat", self._missing, path)
        )

    def _missing(self, path):
        raise FileNotFoundError(path)

    def pipe_file(self, path, value, **options):
        return self._call("pipe", super().pipe_file, path, value, **options)

    def find(self, path, **options):
        return self._call("find", super().find, path, **options)

    def rm_file(self, path):
        return self._call("rm", super().rm_file, path)


assert fsspec  # an extra for tests
