"""A pseudorandom permutation of 0, ..., n - 1 that needs no memory: entry i is computed from i alone.

A Feistel network (Luby and Rackoff, 1988) permutes the numbers of 2k bits. Numbers of n or more are permuted again
until the result is below n (Black and Rogaway, 2002).
"""

import hashlib

_ROUNDS = 6
_MASK = 2**64 - 1


class Permutation:
    """A permutation of 0, ..., n - 1; `permutation[i]` takes about 3 us.

    Args:
        n: how many numbers.
        key: selects the permutation; any values, distinguished by their `repr`.
    """

    def __init__(self, n: int, *key: object) -> None:
        self.n = n
        self._half = max(4, ((n - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"permutation index: got {i}; expected 0 to {self.n - 1}")
        half, low = self._half, 2**self._half - 1
        while True:
            left, right = i >> half, i & low
            for key in self._keys:
                x = (right + key) * 0x9E3779B97F4A7C15 & _MASK
                x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & _MASK
                left, right = right, left ^ ((x >> 40) & low)
            i = left << half | right
            if i < self.n:
                return i

    def __len__(self) -> int:
        return self.n
