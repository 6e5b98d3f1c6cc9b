"""A bound on what each tenant holds of each tier, around any policy.

The bound is soft in one direction only. A tier with room to spare may hold more of a
tenant until it is next asked what is ``expired``, about a second later; nobody has lost
anything by then. Where room has to be made, what tenants hold beyond their quotas goes
first, whoever it is made for: so a tenant within its quota loses nothing to one above.

A tenant's own chunks go in the order of their last use, leaves of the prefix forest
first, whatever the policy inside. To ask that one for a single tenant's chunks would mean
to look through everybody else's, and one instance for each tenant would cost kilobytes
where there are as many tenants as users. See docs/design/policies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtiers.policies.around import PolicyAround
from kvtiers.policies.base import ChunkId, Policy, PolicyRequest, Run
from kvtiers.policies.prefix_order import Chains, PrefixOrder
from kvtiers.policies.sharded import ShardedDict


def with_quotas(policy: Policy) -> Policy:
    """The policy, kept to ``TierInfo.tenant_quota`` where a tier has one; else as it is."""
    if all(tier.tenant_quota is None for tier in policy.tiers):
        return policy
    return QuotaPolicy(policy)


class QuotaPolicy(PolicyAround):
    """Keeps each tenant within its quota of each tier; all else is the inner policy's.

    Chunks without a tenant belong to nobody: they count against no quota, and are evicted
    as the inner policy says. A chunk has one tenant, and so has its prefix, as ids contain
    the tenant's salt.

    Args:
        inner: decides; told of everything.

    """

    def setup(self) -> None:
        """A ledger per tier with a quota."""
        quotas = [tier.tenant_quota for tier in self.tiers]
        self._ledgers = {
            tier.name: _Ledger(quota)
            for tier, quota in zip(self.tiers, quotas, strict=True)
            if quota is not None
        }
        # Whatever goes to a farther tier comes through the first one.
        first = self._ledgers.get(self.tiers[0].name) if self.tiers else None
        if first is not None:
            first.reach = None if None in quotas else max(quotas, key=lambda quota: quota or 0)

    # What happens -----------------------------------------------------------

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
        """Refresh the run among its tenant's chunks, in every tier."""
        self.inner.on_access(run, request, tier)
        for ledger in self._ledgers.values() if run.tenant else ():
            ledger.use(run)

    def on_insert(self, run: Run, tier: str) -> None:
        """Charge the run to its tenant."""
        self.inner.on_insert(run, tier)
        if run.tenant and tier in self._ledgers:
            self._ledgers[tier].insert(run)

    def on_found(self, run: Run, tier: str, age: float) -> None:
        """Charge the run to its tenant, as older than all it is known to hold."""
        self.inner.on_found(run, tier, age)
        if run.tenant and tier in self._ledgers:
            self._ledgers[tier].insert_oldest(run)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Take the chunks off their tenants' accounts."""
        self.inner.on_remove(chunks, tier)
        if tier in self._ledgers:
            self._ledgers[tier].remove(chunks)

    # What to do -------------------------------------------------------------

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        """What tenants hold, or will, beyond their quotas; then the inner policy's order.

        No more of a tenant than is beyond: one whose excess is in use keeps the rest.
        """
        first: set[ChunkId] = set()
        for chunk in self._excess(tier, with_coming=True):
            first.add(chunk)
            yield chunk
        for chunk in self.inner.victims(tier, n_bytes):
            if chunk not in first:
                yield chunk

    def expired(self, tier: str) -> Iterator[ChunkId]:
        """What the inner policy drops, and what tenants hold beyond their quotas."""
        first: set[ChunkId] = set()
        for chunk in self.inner.expired(tier):
            first.add(chunk)
            yield chunk
        for chunk in self._excess(tier):
            if chunk not in first:
                yield chunk

    def _excess(self, tier: str, with_coming: bool = False) -> Iterator[ChunkId]:
        """No further than the caller asks: a scan may find far more than a quota holds."""
        ledger = self._ledgers.get(tier)
        return ledger.excess(with_coming) if ledger is not None else iter(())

    def admit(self, run: Run, tier: str) -> int:
        """No chunk that needs more chunks before it than its tenant's quota holds.

        Into the first tier none that needs more than any tier's quota holds. A tenant that
        has used up its quota is not turned away: what comes takes the place of its own
        coldest chunks.
        """
        ledger = self._ledgers.get(tier)
        if ledger is None:
            return self.inner.admit(run, tier)
        fitting = ledger.fitting(run)
        admitted = self.inner.admit(run.head(fitting), tier) if fitting else 0
        ledger.announce(run.head(admitted))
        return admitted


class _Account:
    """What one tenant holds of one tier.

    Attributes:
        nbytes: in total.
        order: its chunks by last use.
        holdings: of each size of chunk, the one object that all chunks of that size share.

    """

    __slots__ = ("holdings", "nbytes", "order", "tenant")

    def __init__(self, tenant: str, chains: Chains) -> None:
        self.tenant = tenant
        self.nbytes = 0
        self.order = PrefixOrder(chains)
        self.holdings: dict[int, _Holding] = {}


class _Holding:
    """Whose a chunk is, and how large.

    Chunks refer to it by its number, so that a million of them are nothing to the
    garbage collector: see ``columns``.
    """

    __slots__ = ("account", "nbytes", "number")

    def __init__(self, account: _Account, nbytes: int, number: int) -> None:
        self.account = account
        self.nbytes = nbytes
        self.number = number


class _Ledger:
    """Who holds how much of one tier.

    Attributes:
        reach: bytes of a prefix behind which nothing is admitted, None to admit all.

    Args:
        quota: bytes that each tenant may hold.

    """

    def __init__(self, quota: int) -> None:
        self.reach: int | None = quota
        self._quota = quota
        self._numbers: ShardedDict[ChunkId, int] = ShardedDict()
        self._holdings: dict[int, _Holding] = {}
        self._last_number = 0
        self._accounts: dict[str, _Account] = {}
        self._chains = Chains()
        # Accounts above the quota, the first to exceed it first.
        self._above: dict[str, _Account] = {}
        # Who the run admitted last belongs to, and its bytes that the tier does not hold.
        self._coming = ("", 0)

    def insert(self, run: Run) -> None:
        self._charge(run).order.add(run)

    def insert_oldest(self, run: Run) -> None:
        self._charge(run).order.add_oldest(run)

    def use(self, run: Run) -> None:
        account = self._accounts.get(run.tenant)
        if account is not None:
            account.order.use(run)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in chunks:
            number = self._numbers.get(chunk)
            if number is not None:
                holding = self._holdings[number]
                del self._numbers[chunk]
                holding.account.order.discard(chunk)
                self._add(holding.account, -holding.nbytes)

    def fitting(self, run: Run) -> int:
        """How many chunks of the run, from its head, are within reach."""
        if not run.tenant or self.reach is None:
            return len(run)
        return max(0, min(len(run), self.reach // run.chunk_bytes - run.start))

    def announce(self, run: Run) -> None:
        """The run comes next, unless something fails."""
        missing = sum(chunk not in self._numbers for chunk in run.chunks) if run.tenant else 0
        self._coming = (run.tenant, missing * run.chunk_bytes)

    def excess(self, with_coming: bool = False) -> Iterator[ChunkId]:
        """The coldest chunks of each tenant that is above its quota, down to it."""
        tenant, coming = self._coming if with_coming else ("", 0)
        # Its owner's chunks make room for it before anybody else's do.
        if tenant in self._accounts and tenant not in self._above:
            yield from self._coldest(self._accounts[tenant], coming)
        for account in self._above.values():
            yield from self._coldest(account, coming if account.tenant == tenant else 0)

    def _coldest(self, account: _Account, coming: int) -> Iterator[ChunkId]:
        beyond = account.nbytes + coming - self._quota
        chunks = iter(account.order)
        while beyond > 0 and (chunk := next(chunks, None)) is not None:
            number = self._numbers.get(chunk)
            assert number is not None
            beyond -= self._holdings[number].nbytes
            yield chunk

    def _charge(self, run: Run) -> _Account:
        account = self._accounts.get(run.tenant)
        if account is None:
            account = self._accounts[run.tenant] = _Account(run.tenant, self._chains)
        new = [chunk for chunk in run.chunks if chunk not in self._numbers]
        self._numbers.assign(new, self._number(account, run.chunk_bytes))
        self._add(account, len(new) * run.chunk_bytes)
        if self._coming[0] == run.tenant:
            self._coming = ("", 0)
        return account

    def _number(self, account: _Account, nbytes: int) -> int:
        """That of the holding for the account's chunks of this size."""
        holding = account.holdings.get(nbytes)
        if holding is None:
            self._last_number += 1
            holding = account.holdings[nbytes] = _Holding(account, nbytes, self._last_number)
            self._holdings[holding.number] = holding
        return holding.number

    def _add(self, account: _Account, nbytes: int) -> None:
        account.nbytes += nbytes
        if account.nbytes > self._quota:
            self._above[account.tenant] = account
        else:
            self._above.pop(account.tenant, None)
        if not account.nbytes:
            del self._accounts[account.tenant]
            for holding in account.holdings.values():
                del self._holdings[holding.number]
