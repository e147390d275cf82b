"""Opens files by the end of their names, and decompresses them while they are read, up to a limited size."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# A compressed file may decompress to this size, or to this multiple of its size. Text is compressed to a tenth, rarely
# to a fiftieth.
MOST_UNPACKED_BYTES = 64 << 20
MOST_RATIO = 100
MOST_XZ_BYTES = 128 << 20  # memory of a decompressor; `xz -9` needs half of it
_BLOCK_BYTES = 1 << 16
_FIRST_BYTES = {  # of files, by the ends of their names
    ".gz": b"\x1f\x8b",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\0",
    ".zst": b"(\xb5/\xfd",
    ".parquet": b"PAR1\x15",
    ".zip": b"PK\x03\x04",
}
_LFS_POINTER = b"version https://git-lfs"


def _zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


class _Xz(io.RawIOBase):
    """The content of an .xz file. Unlike `lzma.LZMAFile`, it limits the memory that the file's header can request."""

    def __init__(self, path: Path) -> None:
        self._file, self._rest = path.open("rb"), b""
        self._unpacker = self._new()

    def _new(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MOST_XZ_BYTES)

    def readinto(self, buffer: Any, /) -> int:
        while True:
            if self._unpacker.eof:  # a file may have several streams, and zeros after each of them
                self._rest = self._unpacker.unused_data.lstrip(b"\0")
                while not self._rest and (block := self._file.read(_BLOCK_BYTES)):
                    self._rest = block.lstrip(b"\0")
                if not self._rest:
                    return 0
                self._unpacker = self._new()
            if self._unpacker.needs_input and not self._rest:
                self._rest = self._file.read(_BLOCK_BYTES)
                if not self._rest:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            given, self._rest = self._rest if self._unpacker.needs_input else b"", b""
            if content := self._unpacker.decompress(given, max_length=len(buffer)):
                buffer[: len(content)] = content
                return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


UNPACKERS: Mapping[str, Callable[[Path], Any]] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": _Xz, ".zst": _zst}


def check_first_bytes(path: Path, name: str) -> None:
    """Raises ValueError if the first bytes of a file contradict the end of its `name`, or are a Git LFS pointer."""
    with path.open("rb") as file:
        first_bytes = file.read(len(_LFS_POINTER))
    if first_bytes == _LFS_POINTER:
        raise ValueError("it is a Git LFS pointer, and not the file: run git lfs pull")
    ending = Path(name.lower()).suffix
    text_format = ".json" if first_bytes.lstrip()[:1] in (b"{", b"[") else ending
    content = next((end for end, magic in _FIRST_BYTES.items() if first_bytes.startswith(magic)), text_format)
    if content != ending and {content, ending} & {*_FIRST_BYTES}:
        raise ValueError(f"its content is {content} and not {ending}: rename it, or write it again")


def opened(path: Path, name: str) -> io.BufferedReader:
    """Returns the bytes of a file, decompressed while they are read if the end of its `name` requires it.

    Reading raises ValueError where a compressed file is longer than text can be.
    """
    unpack = UNPACKERS.get(Path(name.lower()).suffix)
    if not unpack:
        return path.open("rb")
    return io.BufferedReader(_Unpacked(unpack(path), most_unpacked(path.stat().st_size)))


def most_unpacked(size: int) -> int:
    """Returns the largest decompressed size for a compressed file of `size` bytes."""
    return max(MOST_UNPACKED_BYTES, MOST_RATIO * size)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file. ValueError where it is longer than text can be."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most, self._count = stream, most, 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        count = self._stream.readinto(buffer)
        self._count += count
        if self._count > self._most:
            raise ValueError(
                f"it unpacks to more than {self._most >> 20} MiB and {MOST_RATIO} times its size; if it is yours, "
                "unpack it first"
            )
        return count
