"""Read, change and write saved files without numkv's code: for damage with right checksums."""

import json
import zlib
from dataclasses import dataclass

import numpy as np

DTYPES = {"F64": "f8", "F32": "f4", "U16": "u2", "U8": "u1", "I8": "i1", "I32": "i4", "I64": "i8"}
NAMES = {np.dtype(x): name for name, x in DTYPES.items()}


@dataclass
class File:
    """A file's own header, its metadata, and its tensors."""

    fields: dict
    tensors: dict

    @classmethod
    def read(cls, path):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
        metadata = header.pop("__metadata__")
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            x = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]])
            tensors[name] = x.reshape(entry["shape"]).copy()
        return cls(json.loads(metadata["numkv"]), tensors)

    def header(self, checksums=True):
        """Return the safetensors header as an object, with renewed checksums if asked for."""
        if checksums and isinstance(self.fields, dict) and "crc32" in self.fields:
            self.fields["crc32"] = {
                name: f"{zlib.crc32(x.tobytes()):08x}" for name, x in self.tensors.items()
            }
        text = json.dumps(self.fields)
        crc = f"{zlib.crc32(text.encode()):08x}"
        found, end = {"__metadata__": {"numkv": text, "numkv_crc32": crc}}, 0
        for name, x in self.tensors.items():
            begin, end = end, end + x.nbytes
            found[name] = {
                "dtype": NAMES[x.dtype],
                "shape": list(x.shape),
                "data_offsets": [begin, end],
            }
        return found

    def write(self, path, header=None):
        """Write the file; with another header, if one is given."""
        given = self.header() if header is None else header
        text = given if isinstance(given, bytes) else json.dumps(given).encode()
        data = b"".join(x.tobytes() for x in self.tensors.values())
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def places(x, path=()):
    """Yield the paths of all values in nested lists and objects."""
    yield path
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(x, path, value):
    """Return a copy with another value at a path; `value` may be a function of the old one."""
    if not path:
        return value(x) if callable(value) else value
    copy = list(x) if isinstance(x, list) else dict(x)
    copy[path[0]] = changed(x[path[0]], path[1:], value)
    return copy
