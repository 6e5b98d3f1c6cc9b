"""How much of an engine's time measuring may take: some share of computing prompts."""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.connector.heat import HeatCost

# Seconds that are saved up at most while little is measured, so that a change of load does
# not have all of it spent on a few prompts.
_MOST_SAVED = 1.0
# Of a price that fell, in what is expected of the next measurement. One that rose counts whole.
_LEARNING = 0.3


@dataclass(frozen=True, slots=True)
class Reserve:
    """What was set aside for a measurement that is under way: by the clock, and of the CPUs."""

    tokens: int
    wall_s: float
    cpu_s: float


class _Account:
    """Of one kind of seconds: computing prompts pays in, measuring takes out."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = 0.0
        self._price: float | None = None
        self._unpriced = 0.0

    def spent(self, prefill: float, probe: float, measured: bool) -> None:
        left = min(_MOST_SAVED, self._left + self._share * prefill - probe)
        if not (prefill or measured):
            # Looking at steps that compute no prompt: a night of those must not take a day to
            # pay back.
            left = max(left, min(self._left, -_MOST_SAVED))
        self._left = left

    def expected(self, tokens: int) -> float:
        """For measuring a prompt of so many. Of the first nobody knows: it is the only one."""
        if self._price is None:
            return _MOST_SAVED + max(0.0, self._left)
        return self._price * tokens

    def allows(self, tokens: int) -> bool:
        # The first is on credit. What takes more than is ever saved waits for half of that: each
        # step takes a little, so that all of it is never there.
        needed = 0.0 if self._price is None else min(self.expected(tokens), _MOST_SAVED / 2)
        return self._left >= needed

    def set_aside(self, seconds: float) -> None:
        self._left -= seconds

    def give_back(self, seconds: float) -> None:
        self._left = min(_MOST_SAVED, self._left + seconds)

    def measured(self, probe: float) -> None:
        self._unpriced += probe

    def forget(self) -> None:
        self._unpriced = 0.0

    def learn(self, tokens: int) -> None:
        price, self._unpriced = self._unpriced / tokens, 0.0
        old = price if self._price is None else self._price
        self._price = max(price, old + _LEARNING * (price - old))


class HeatBudget:
    """Two accounts, by the clock and in processor time: both have to allow what is measured.

    Either can be the scarcer. One thread that measures while others wait takes little
    processor time and all of the clock's; where cores are shared it is the other way round,
    as one thread by itself waits less than a team.

    What a measurement takes is known when it has been made, so what those before it took is
    set aside, by the tokens of the prompt, and is given back when the true figure is there.
    One whose answer never comes stays paid for. The scheduler's thread only.

    Args:
        share: of computing prompts, measuring included.

    """

    def __init__(self, share: float) -> None:
        self._wall, self._cpu = _Account(share), _Account(share)

    def spent(self, cost: HeatCost, *, measured: bool = False) -> None:
        """Of one rank, or of all together.

        Args:
            cost: what it was.
            measured: whether measurements are in it, so that it says what they take.

        """
        self._wall.spent(cost.prefill_s, cost.probe_s, measured)
        self._cpu.spent(cost.prefill_cpu_s, cost.probe_cpu_s, measured)
        if measured:
            self._wall.measured(cost.probe_s)
            self._cpu.measured(cost.probe_cpu_s)

    def reserve(self, tokens: int) -> Reserve | None:
        """For one more prompt, of so many tokens; None if it may not be measured."""
        if not (self._wall.allows(tokens) and self._cpu.allows(tokens)):
            return None
        made = Reserve(tokens, self._wall.expected(tokens), self._cpu.expected(tokens))
        self._wall.set_aside(made.wall_s)
        self._cpu.set_aside(made.cpu_s)
        return made

    def give_back(self, reserve: Reserve) -> None:
        """It was measured and is paid for, or never will be."""
        self._wall.give_back(reserve.wall_s)
        self._cpu.give_back(reserve.cpu_s)

    def forget(self) -> None:
        """What was spent on measurements since the last one that is priced was for none."""
        self._wall.forget()
        self._cpu.forget()

    def learn(self, tokens: int) -> None:
        """What was spent on measurements since the last call was for so many tokens."""
        self._wall.learn(tokens)
        self._cpu.learn(tokens)
