"""Multi-turn chats: every turn sends the whole conversation again, answers included.

Prompts are token ids here, not lengths with keys: the engine hashes its own output blocks too, so
the next turn finds the answer it re-sends in the prefix cache, as it does in a real engine.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

from simulator.errors import WorkloadError
from simulator.lengths import Draw
from simulator.workload import LONGEST, MOST_REQUESTS, Workload

LONGEST_CHAT = 1 << 24  # tokens of a conversation: beyond, its token ids would be the next one's
ANSWER = 0  # the token id of every simulated output token; prompts never use it


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations over a workload's columns: turns are neighbours, in order."""

    conversations: list[range]  # request indices of each conversation's turns
    system: int  # tokens of the system prompt all of them begin with
    said: array  # 'q': by request, new tokens of the user in that turn
    answers: array  # 'q': by request, tokens of the answer
    pauses: array  # 'd': by request, seconds between the answer before and this turn
    of: array  # 'q': by request, its conversation

    def prompt(self, index: int) -> list[int]:
        """The token ids turn `index` sends: system prompt, all turns before it, the new words."""
        number = self.of[index]
        tokens = list(range(1, self.system + 1))
        base = (number + 1) << 24
        for turn in range(self.conversations[number].start, index + 1):
            tokens += range(base + len(tokens), base + len(tokens) + self.said[turn])
            if turn < index:
                tokens += [ANSWER] * self.answers[turn]
        return tokens


def chats(rate: float, conversations: int, inputs: Draw, outputs: Draw, *, turns: int = 4,
          think: float = 5.0, system: int = 0, seed: int = 0) -> Workload:
    """Conversations that begin as a Poisson process of `rate` a second, each of `turns` turns.

    `inputs` draws what the user adds in a turn, `outputs` the answer; the next turn follows `think`
    seconds (exponential) after the answer. WorkloadError for what cannot be.
    """
    for name, value, least, most in (("conversations", conversations, 1, MOST_REQUESTS),
                                     ("turns", turns, 1, MOST_REQUESTS // max(conversations, 1)),
                                     ("system prompt tokens", system, 0, LONGEST_CHAT)):
        if not least <= value <= most:
            raise WorkloadError(f"the number of {name} is {value}, must be from {least} to "
                                f"{most:,}")
    if not rate > 0 or not 0 <= think * turns <= LONGEST:
        raise WorkloadError(f"chats need a rate above 0 and a think time of at least 0, with "
                            f"{turns} turns at most {LONGEST / max(turns, 1):g} s, got "
                            f"{rate:g} and {think:g}")
    begin, now = Random(f"{seed}:arrivals"), 0.0
    at, pauses = array("d"), array("d")
    prompts, said, answers, of = (array("q") for _ in range(4))
    rng_in, rng_out, rng_think = (Random(f"{seed}:{name}") for name in
                                  ("inputs", "outputs", "think"))
    ranges = []
    for number in range(conversations):
        now += begin.expovariate(rate) if rate != float("inf") else 0.0
        ranges.append(range(len(at), len(at) + turns))
        history = system
        for _ in range(turns):
            new, answer = inputs(rng_in), outputs(rng_out)
            at.append(now)
            pauses.append(rng_think.expovariate(1 / think) if think else 0.0)
            prompts.append(history + new)
            said.append(new)
            answers.append(answer)
            of.append(number)
            history += new + answer
            if history > LONGEST_CHAT:
                raise WorkloadError(f"a chat becomes {history:,} tokens long, and at most "
                                    f"{LONGEST_CHAT:,} can be told apart: take shorter lengths or "
                                    f"fewer turns")
    made = Chats(ranges, system, said, answers, pauses, of)
    return Workload(f"{conversations:,} chats of {turns} turns", at, prompts, answers, chats=made)
