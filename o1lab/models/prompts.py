"""Forty short real prompts, from six words to a paragraph: questions and small reasoning tasks with a checkable end."""

from __future__ import annotations

import random

PROMPTS = (
    "What is the capital of France?",
    "Name the three primary colours of paint.",
    "How many days has a leap year?",
    "Why is the sky blue at noon and red at sunset?",
    "Which is heavier, a kilogram of iron or a kilogram of wool? Say why.",
    "Translate into German: the train to Vienna leaves at half past nine.",
    "Give me one synonym for each of these words: quick, brave, silent, huge.",
    "What is 17 plus 26? Show the carry.",
    "Work out 12 times 13 step by step.",
    "Start with 7. Double it. Subtract 5. Multiply by 3. What number do you have?",
    "A shop sells pens at 3 for 2 pounds. What do 12 pens cost?",
    "Tom is taller than Ann. Ann is taller than Raj. Who is the shortest of the three?",
    "If all roses are flowers and some flowers fade quickly, must some roses fade quickly? Explain in two sentences.",
    "What comes next: 2, 6, 12, 20, 30? State the rule.",
    "A clock shows 3:15. What is the angle between its hands?",
    "Put these in order of size, smallest first: a mountain, an atom, a cat, a bacterium, a planet.",
    "Explain to a ten-year-old what a computer program is.",
    "Write one polite sentence that asks a neighbour to turn the music down.",
    "List five vegetables that grow below the ground.",
    "What is the difference between weather and climate?",
    "Which months of the year have exactly thirty days?",
    "I have 3 boxes. Each holds 4 bags, and each bag holds 5 marbles. I lose 7 marbles. How many are left?",
    "A train leaves at 08:40 and arrives at 11:05. How long is the journey?",
    "Reverse the word 'lantern' letter by letter, then say the result.",
    "Is 91 a prime number? Try each small divisor in turn before you answer.",
    "A farmer has chickens and goats: 10 heads and 28 legs in all. How many goats are there?",
    "Summarise in one sentence: The library opened in 1903. It burned in 1941, was rebuilt by volunteers, and today "
    "lends more books a year than the town has people.",
    "Give two reasons for and two reasons against working from home, each in at most ten words.",
    "What does a thermostat do, and why does it switch on and off instead of running all the time?",
    "Write a Python function that returns the largest of three numbers without using max.",
    "Correct the grammar: Me and him was going to the market when it start raining.",
    "Five people sit in a row. Bo sits left of Cy, Di sits right of Cy, Al sits at the far left, and Ed sits between "
    "Cy and Di. Give the order from left to right.",
    "A tank fills in 6 hours through one pipe and in 3 hours through another. With both open, how long does it take? "
    "Reason in steps and end with the number of hours.",
    "Let a = 4, b = a + 3, c = 2 * b - a, d = c - b. Compute every value in order, one line for each, and end with d.",
    "A password has two different letters from the set A, B, C followed by one digit that is odd. How many passwords "
    "are possible? Count the choices for each position first.",
    "Describe how to make a cup of tea in exactly four numbered steps.",
    "Monday's meeting was moved two days later, and then one day earlier. The report is due the day after the meeting. "
    "On which weekday is the report due?",
    "Here are five measurements in millimetres: 12, 15, 11, 40, 14. One of them is probably a mistake. Which one, how "
    "can you tell, and what is the mean of the other four?",
    "You have a 3-litre jug, a 5-litre jug and a tap. Measure exactly 4 litres. Write each step with the amounts in "
    "both jugs after it, and stop as soon as you are there.",
    "A server answers 120 requests a minute and keeps 640 bytes of each answer for ever. It starts with 2 gigabytes "
    "free. First work out how many bytes it loses in an hour, then in a day, and then say roughly after how many days "
    "it runs out. Keep every intermediate number.",
)


def pick(n: int, seed: int = 0) -> list[str]:
    """Choose ``n`` prompts, the same ones in the same order for the same seed; all forty come before one repeats.

    >>> pick(2, seed=1) == pick(3, seed=1)[:2]
    True
    >>> len(set(pick(40)))
    40
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    generator, chosen = random.Random(seed), []
    while len(chosen) < n:
        chosen += generator.sample(PROMPTS, len(PROMPTS))
    return chosen[:n]
