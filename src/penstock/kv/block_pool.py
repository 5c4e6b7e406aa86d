"""The memory of one cache group as numbered slabs and pages with reference counts. Source: vLLM, arXiv 2309.06180, 4.2.

A *slab* is `pages_per_slab` consecutive pages: slab s owns pages [s * W, (s + 1) * W). Shared tables hold slabs. Ragged
tables hold single pages, which come from *broken* slabs; a broken slab joins again once all its pages are free.

A slab that was never handed out is *fresh*: it needs no memory yet. Fresh ones have the highest numbers and go last.

Epochs: a slab that a step in flight may still look at must not be written by anybody else. So whatever becomes
unreferenced while steps are in flight waits in quarantine, tagged with the newest submitted step, until that retired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

BROKEN = -1
"""`refs` of a slab whose pages are handed out one by one."""


class BlockPool:
    """Slabs and pages of one cache group; integers only.

    Attributes:
        refs: references per slab, BROKEN for broken ones. Read it freely (the hot path does); never write it.
        page_refs: references per page in use, pages of broken slabs only. Read only.
        num_fresh: slabs, read only; num_kept_back: how many of them are not handed out (`kv.backing` decides).
    """

    __slots__ = (
        "_broken", "_free", "_free_pages", "_num_quarantined", "_quarantine", "_retired", "_submitted", "num_fresh",
        "num_kept_back", "num_slabs", "page_refs", "pages_per_slab", "refs",
    )  # fmt: skip

    def __init__(self, num_slabs: int, pages_per_slab: int) -> None:
        self.num_slabs = num_slabs
        self.pages_per_slab = pages_per_slab
        self.refs: list[int] = [0] * num_slabs
        self.page_refs: dict[int, int] = {}
        # Last in, first out: what was touched last is handed out first, while it is still in a cache. It starts
        # reversed so that a fresh pool hands out ascending runs, whose zeroing merges into one PageOp.
        self._free = list(range(num_slabs - 1, -1, -1))
        self.num_fresh = num_slabs  # the first of `_free`
        self.num_kept_back = 0
        self._free_pages: dict[int, None] = {}
        self._broken: dict[int, int] = {}
        self._quarantine: deque[tuple[int, int, bool]] = deque()
        self._num_quarantined = 0
        self._submitted = -1
        self._retired = -1

    @property
    def num_free(self) -> int:
        """Whole slabs that can be handed out now."""
        return len(self._free) - self.num_kept_back

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now, counting the free slabs that would be broken for them."""
        return self.num_free * self.pages_per_slab + len(self._free_pages)

    @property
    def num_quarantined(self) -> int:
        """Unreferenced slabs that wait for a step to retire (pages of broken slabs are not counted here)."""
        return self._num_quarantined

    @property
    def waiting(self) -> bool:
        """Whether anything, slab or page, is in quarantine."""
        return bool(self._quarantine)

    def alloc_slab(self) -> int | None:
        """A slab with one reference, or None. Its content is whatever was there before."""
        slabs = self.alloc_slabs(1)
        return None if slabs is None else slabs[0]

    def alloc_slabs(self, n: int) -> list[int] | None:
        """`n` slabs with one reference each, or None (and nothing handed out) if there are fewer."""
        free = self._free
        if n > len(free) - self.num_kept_back:
            return None
        refs = self.refs
        slabs = [free.pop() for _ in range(n)]
        for slab in slabs:
            refs[slab] = 1
        if len(free) < self.num_fresh:
            self.num_fresh = len(free)
        return slabs

    def find_run(self, n: int, own: Sequence[int] = ()) -> int | None:
        """First fit: where the lowest run of `n` consecutive slabs begins that are free or in `own`; None if nowhere.

        For the contiguous baselines. Linear in the free slabs, unlike everything else here.
        """
        if n > len(self._free) + len(own):
            return None
        start = end = -1
        for slab in sorted([*self._free, *own]):
            if slab != end:
                start = slab
            end = slab + 1
            if end - start == n:
                return start
        return None

    def alloc_run(self, first: int, n: int, own: Sequence[int] = ()) -> list[int]:
        """The slabs [first, first + n) of `find_run`, one reference each; those in `own` keep the one they have."""
        run = range(first, first + n)
        taken = set(run).difference(own)
        left = [slab for slab in self._free if slab not in taken]
        assert len(left) == len(self._free) - len(taken), f"slabs {first}...{first + n - 1} are not all free"
        self._free = left
        self.num_fresh = 0  # a run may lie anywhere
        for slab in taken:
            self.refs[slab] = 1
        return list(run)

    def alloc_page(self) -> int | None:
        """A single page with one reference, or None. Free pages of broken slabs go first."""
        if self._free_pages:
            page, _ = self._free_pages.popitem()
            self._broken[page // self.pages_per_slab] += 1
        elif (slabs := self.alloc_slabs(1)) is not None:
            slab = slabs[0]
            page = slab * self.pages_per_slab
            self.refs[slab] = BROKEN
            self._broken[slab] = 1
            for other in range(page + self.pages_per_slab - 1, page, -1):
                self._free_pages[other] = None
        else:
            return None
        self.page_refs[page] = 1
        return page

    def alloc_pages(self, n: int) -> list[int] | None:
        """`n` single pages, or None (and nothing handed out) if there are fewer."""
        if n > self.num_free_pages:
            return None
        pages: list[int] = []
        for _ in range(n):
            page = self.alloc_page()
            assert page is not None
            pages.append(page)
        return pages

    def freshen(self) -> None:
        """What is free behind the last slab in use is fresh again. Lower numbers are handed out first from now on."""
        self._free.sort(reverse=True)
        others = (i for i, slab in enumerate(self._free) if slab != self.num_slabs - 1 - i)
        self.num_fresh = next(others, len(self._free))

    def split(self, slab: int) -> None:
        """A slab with one holder becomes single pages with one reference each, which this holder has now."""
        assert self.refs[slab] == 1, f"slab {slab} has {self.refs[slab]} holders"
        width = self.pages_per_slab
        self.refs[slab] = BROKEN
        self._broken[slab] = width
        self.page_refs.update(dict.fromkeys(range(slab * width, (slab + 1) * width), 1))

    def ref_slabs(self, slabs: Iterable[int]) -> None:
        """One more reference to each."""
        refs = self.refs
        for slab in slabs:
            assert refs[slab] > 0, f"slab {slab} is referenced while it is free or broken"
            refs[slab] += 1

    def ref(self, slab: int) -> None:
        self.ref_slabs((slab,))

    def unref_slabs(self, slabs: Iterable[int], *, unseen: bool = False) -> None:
        """One reference less to each; at zero it is free, or quarantined while steps are in flight.

        `unseen` says that no step in flight has the slab in a table: it is free at once. The caller has to know.
        """
        refs = self.refs
        at_once = unseen or self._submitted <= self._retired
        for slab in slabs:
            left = refs[slab] - 1
            assert left >= 0, f"slab {slab} is dropped more often than it was taken"
            refs[slab] = left
            if left:
                continue
            if at_once:
                self._free.append(slab)
            else:
                self._quarantine.append((self._submitted, slab, False))
                self._num_quarantined += 1

    def unref(self, slab: int, *, unseen: bool = False) -> None:
        self.unref_slabs((slab,), unseen=unseen)

    def ref_pages(self, pages: Iterable[int]) -> None:
        """One more reference to each single page."""
        for page in pages:
            self.page_refs[page] += 1

    def unref_pages(self, pages: Iterable[int]) -> None:
        """One reference less to each single page; epochs as for slabs."""
        in_flight = self._submitted > self._retired
        for page in pages:
            left = self.page_refs[page] - 1
            if left:
                self.page_refs[page] = left
                continue
            del self.page_refs[page]
            if in_flight:
                self._quarantine.append((self._submitted, page, True))
            else:
                self._free_page(page)

    def _free_page(self, page: int) -> None:
        slab = page // self.pages_per_slab
        busy = self._broken[slab] - 1
        if busy:
            self._broken[slab] = busy
            self._free_pages[page] = None
            return
        del self._broken[slab]
        first = slab * self.pages_per_slab
        for other in range(first, first + self.pages_per_slab):
            self._free_pages.pop(other, None)
        self.refs[slab] = 0
        self._free.append(slab)

    def submitted(self, step: int) -> None:
        """`step` was handed to the executor. Steps are numbered upwards."""
        assert step > self._submitted, f"step {step} is submitted after step {self._submitted}"
        self._submitted = step

    def retired(self, step: int) -> None:
        """`step` and all before it are done; what waited for them becomes free."""
        assert step <= self._submitted, f"step {step} retires before it was submitted"
        self._retired = max(self._retired, step)
        waiting = self._quarantine
        while waiting and waiting[0][0] <= step:
            _, which, is_page = waiting.popleft()
            if is_page:
                self._free_page(which)
            else:
                self._num_quarantined -= 1
                self._free.append(which)

    def check_invariants(self) -> None:
        """Raises AssertionError unless every slab and page is in exactly one state and free ones are unreferenced."""
        width = self.pages_per_slab
        state = dict.fromkeys(self._free, "free")

        def put(slab: int, name: str) -> None:
            assert slab not in state, f"slab {slab} is both {state[slab]} and {name}"
            state[slab] = name

        fresh, last = self._free[: self.num_fresh], self.num_slabs - 1
        assert fresh == list(range(last, last - self.num_fresh, -1)), f"slabs {fresh} are not all fresh"
        assert 0 <= self.num_kept_back <= self.num_fresh, "slabs that were handed out are kept back"
        assert len(state) == len(self._free), f"a slab stands twice among the free ones: {sorted(self._free)}"
        for slab in self._free:
            assert self.refs[slab] == 0, f"free slab {slab} has {self.refs[slab]} references"
        waiting_pages: set[int] = set()
        for step, which, is_page in self._quarantine:
            assert step > self._retired, f"quarantine of retired step {step} was not opened"
            if is_page:
                assert which not in waiting_pages, f"page {which} is quarantined twice"
                waiting_pages.add(which)
            else:
                put(which, "quarantined")
                assert self.refs[which] == 0, f"quarantined slab {which} has {self.refs[which]} references"
        assert self._num_quarantined == len(state) - len(self._free), "quarantine is miscounted"
        busy = dict.fromkeys(self._broken, 0)
        for page in self.page_refs:
            assert self.page_refs[page] > 0, f"page {page} is kept without a reference"
            assert page not in waiting_pages, f"page {page} is in use and in quarantine"
            busy[page // width] += 1
        for page in waiting_pages:
            busy[page // width] += 1
        assert busy == self._broken, "busy pages of broken slabs are miscounted"
        for slab, num in busy.items():
            put(slab, "broken")
            assert self.refs[slab] == BROKEN, f"broken slab {slab} has {self.refs[slab]} references"
            assert 0 < num <= width, f"broken slab {slab} holds no page in use and did not join again"
            for page in range(slab * width, (slab + 1) * width):
                in_use = page in self.page_refs or page in waiting_pages
                assert in_use != (page in self._free_pages), f"page {page} is lost or both free and in use"
        num_free_pages = sum(width - n for n in busy.values())
        assert len(self._free_pages) == num_free_pages, "a page is free although its slab is not broken"
        for slab, count in enumerate(self.refs):
            if slab not in state:
                assert count > 0, f"slab {slab} is lost: {count} references and in no list"
