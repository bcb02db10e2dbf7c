"""Problems as the coupled model sees them: words, ids of the steps that they help to predict, slots in the step.

>>> problems = make(1, 2, torch.Generator().manual_seed(0), shuffled=0.0)
>>> problems.slots[0].tolist()  # start mark, program, then state, operator, operand of each step
[5, 0, 1, 0, 1, 2, 3, 4, 2, 3, 4]
>>> first, second = problems.ids[0, [1, 3]].tolist()
>>> problems.ids[0].tolist() == [0, first, first, second, second, first, first, first, second, second, second]
True
>>> problems.targets.shape  # operator, operand and state of each step
torch.Size([1, 6])
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from o1lab.errors import ModelError
from o1lab.models import batches, vocabulary

FIRST, WORDS = vocabulary.NUMBER, vocabulary.NUMBERS + len(vocabulary.OPERATORS)
"""The words in use are neighbours in the vocabulary: the numbers, then the operators."""
SLOTS = PROGRAM_OPERATOR, PROGRAM_OPERAND, STATE, OPERATOR, OPERAND, BEGIN = range(6)


@dataclass(frozen=True)
class Problems:
    """Problems of one shape: N program entries, ``asked`` steps.

    Attributes
    ----------
    words, ids, slots : LongTensor, shape (rows, 1 + 2 N + 3 asked)
        Token ids of the vocabulary, step ids, slots. The chain's columns hold state, operator, operand of each step.
    targets : LongTensor, shape (rows, 3 asked)
        The token that each column of the chain predicts: operator, operand, state after the step.
    """

    words: torch.Tensor
    ids: torch.Tensor
    slots: torch.Tensor
    targets: torch.Tensor

    def first(self, rows: int) -> Problems:
        """The first ``rows`` problems."""
        return Problems(self.words[:rows], self.ids[:rows], self.slots[:rows], self.targets[:rows])


@dataclass(frozen=True)
class Prompt:
    """A ``modular`` prompt taken apart.

    Attributes
    ----------
    labels, chain : list of int
        Tokens of the program's labels as shown, and of the asked steps' labels in order.
    program : list of int
        Operator, operand, operator, …
    state : int
        The state given.
    """

    labels: list[int]
    chain: list[int]
    program: list[int]
    state: int


def tokens(steps: int) -> int:
    """Input tokens of a chain of N steps: the start mark, 2 N of the program, 3 N of the chain."""
    return 1 + 5 * steps


def make(
    rows: int, steps: int, generator: torch.Generator, *, step_ids: int = 320, modulus: int = vocabulary.NUMBERS,
    shuffled: float = 0.5, difficulty: float = 1.0,
) -> Problems:  # fmt: skip
    """``rows`` new problems of ``steps`` steps on the generator's device; parameters as in ``batches.make``."""
    if not 0 < steps < step_ids:
        raise ModelError(f"each of {steps} steps needs an id of its own: 1 to {step_ids - 1} steps do")
    parts = batches.draw("modular", rows, steps, generator, modulus=modulus, difficulty=difficulty)
    device, operands = generator.device, parts.operands[:, :, 0]
    ids = _ids(rows, steps, step_ids, generator)
    order = batches.shown(rows, steps, shuffled, generator)
    program = batches.taken(torch.stack([parts.operators, operands], 2), order).flatten(1)
    chain = torch.stack([parts.states[:, :-1, 0], parts.operators, operands], 2).flatten(1)
    targets = torch.stack([parts.operators, operands, parts.states[:, 1:, 0]], 2).flatten(1)
    begin = torch.full((rows, 1), vocabulary.BOS, device=device)
    all_ids = [torch.zeros_like(begin), ids.gather(1, order).repeat_interleave(2, 1), ids.repeat_interleave(3, 1)]
    words = torch.cat([begin, program, chain], 1)
    return Problems(words, torch.cat(all_ids, 1), _slots(rows, steps, steps, device), targets)


def read(prompt: Sequence[int]) -> Prompt:
    """Take apart a prompt of ``modular`` chains in the reasoner's tokens.

    Raises
    ------
    ModelError
        It is another kind of prompt.

    Examples
    --------
    >>> text = "<bos> modular from s8 to s9 state 13 program s9 - 20 s8 * 3 chain"
    >>> read(vocabulary.encode(text)).program == vocabulary.encode("- 20 * 3")
    True
    """
    index, most = vocabulary.INDEX, vocabulary.STEP + vocabulary.STEPS
    ids = list(prompt)
    frame = [ids[place] for place in (0, 1, 2, 4, 6, 8, -1)] if len(ids) > 12 else []
    body = ids[9:-1]
    labels, program = body[::3], [word for place, word in enumerate(body) if place % 3]
    if frame == [index[word] for word in ("<bos>", "modular", "from", "to", "state", "program", "chain")]:
        chain = list(range(ids[3], ids[5] + 1))
        known = all(vocabulary.STEP <= label < most for label in labels) and len(set(labels)) == len(labels)
        numbers = all(FIRST <= word < vocabulary.OPERATOR for word in [ids[7], *program[1::2]])
        operators = all(vocabulary.OPERATOR <= word < FIRST + WORDS for word in program[::2])
        if len(body) % 3 == 0 and chain and set(chain) <= set(labels) and known and numbers and operators:
            return Prompt(labels, chain, program, ids[7])
    raise ModelError("the coupled model solves 'modular' chains, shown in the reasoner's tokens, and nothing else")


def stack(prompts: Sequence[Prompt], step_ids: int, device: torch.device) -> Problems:
    """Prompts of one shape as tensors; operators, operands and targets of the chain hold ``0`` until they are known.

    Labels become ids that follow from the prompt's labels alone, so that other labels give the same problem another
    context.
    """
    steps, asked = len(prompts[0].labels), len(prompts[0].chain)
    if steps >= step_ids:
        raise ModelError(f"a program of {steps} entries has more steps than the model has ids ({step_ids - 1})")
    words, ids = [], []
    for prompt in prompts:
        seed = zlib.crc32(repr(sorted(prompt.labels)).encode())
        drawn = _ids(1, steps, step_ids, torch.Generator().manual_seed(seed))[0].tolist()
        by_label = dict(zip(sorted(prompt.labels), drawn, strict=True))
        words.append([vocabulary.BOS, *prompt.program, prompt.state, *[FIRST] * (3 * asked - 1)])
        shown = [by_label[label] for label in prompt.labels for _ in range(2)]
        ids.append([0, *shown, *(by_label[label] for label in prompt.chain for _ in range(3))])
    both = [torch.tensor(values, device=device) for values in (words, ids)]
    unknown = both[0].new_full((len(prompts), 3 * asked), FIRST)
    return Problems(*both, _slots(len(prompts), steps, asked, device), unknown)


def _slots(rows: int, steps: int, asked: int, device: torch.device) -> torch.Tensor:
    slots = [BEGIN, *[PROGRAM_OPERATOR, PROGRAM_OPERAND] * steps, *[STATE, OPERATOR, OPERAND] * asked]
    return torch.tensor(slots, device=device).expand(rows, -1)


def _ids(rows: int, steps: int, step_ids: int, generator: torch.Generator) -> torch.Tensor:
    """Ordered random subsets of the ids from 1 on, shape (rows, steps); 0 is the start mark's."""
    keys = torch.rand(rows, step_ids - 1, generator=generator, device=generator.device)
    return 1 + keys.argsort(1)[:, :steps].sort(1).values
