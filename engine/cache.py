"""Who holds which page of a cache. Plain Python: the tensors belong to the models' stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """More pages were asked for than are free: the caller waits, evicts or refuses."""


class PagePool:
    """Pages 0..num_pages-1, each free or held by one or more holders, counted.

    Page 0 may be kept aside (`reserved=1`) as a dummy for padded rows: it is never given out.
    """

    def __init__(self, num_pages: int, *, reserved: int = 0) -> None:
        if num_pages - reserved < 1:
            raise ValueError(f"a pool needs a page to give out: {num_pages} pages, {reserved} reserved")
        self.num_pages = num_pages
        self.num_reserved = reserved
        self._free = list(range(num_pages - 1, reserved - 1, -1))  # a stack: the lowest page leaves first
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_reserved - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one holder each. Raises OutOfPages, and takes none, if fewer are free."""
        if count < 0:
            raise ValueError(f"can't take {count} pages")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these held pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and can't be shared"
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for each; a page without a holder is free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def check_integrity(self) -> None:
        """Every page is either free, once, or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.num_reserved, self.num_pages):
            assert (page in free) == (self._holders[page] == 0), f"page {page} is both free and held, or neither"
