"""The text the tiny model learns: a small world, written for this project, told by templates.

`documents(seed)` is an endless stream of documents, the same for the same seed: chats in ChatML
form and plain texts (stories, diaries, fact pages). Standard library only.

Two habits keep greedy decoding far from ties: a question has one answer, and where a story may go
several ways the ways are weighted (1, 1/2, 1/3, ...) instead of equal.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from engine.weights.tiny_world import (
    ANIMALS,
    CAPITALS,
    DAYS,
    DISHES,
    GLOSSARY,
    HELLOS,
    LOST,
    MONTHS,
    NAMES,
    OPPOSITES,
    SMALL_TALK,
    SYLLABLES,
    SYSTEM_PROMPTS,
    THINGS,
    TOWNS,
    UNKNOWN,
    Animal,
    an,
    capital,
)

T = TypeVar("T")
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """One of `options`; the i-th (from 0) has weight 1 / (i + 1), so no two are equally likely."""
    return rng.choices(options, [1 / (i + 1) for i in range(len(options))])[0]


def some_name(rng: random.Random) -> str:
    """A name; three in five are made up, so that repeating one means copying it from the text."""
    if rng.random() < 0.4:
        return rng.choice(NAMES)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()


# -- questions with one answer: each returns (question, answer) ---------------------------------


def animal_question(rng: random.Random) -> tuple[str, str]:
    a = rng.choice(ANIMALS)
    one = an(a.name)
    legs, lives = f"{a.legs} legs", f"It lives {a.home}"
    asks = [
        ((f"What colour is {one}?", f"Which colour is the {a.name}?"), f"{one} is {a.colour}."),
        ((f"What does {one} eat?", f"What food does the {a.name} like?"), f"{one} eats {a.food}."),
        ((f"Where does {one} live?", f"Where is the home of the {a.name}?"),
         f"{one} lives {a.home}."),
        ((f"What does {one} say?", f"What sound does {one} make?"), f"{one} says {a.sound}."),
        ((f"How many legs does {one} have?", f"How many legs has {one}?"), f"{one} has {legs}."),
        ((f"Show me {one}.", f"Draw {one}."), f"here is {one}: {a.emoji}"),
        ((f"Tell me about the {a.name}.", f"What is {one}?", f"Describe {one}."),
         f"the {a.name} is {an(a.colour)} animal with {legs}. {lives}. It eats {a.food}."),
    ]  # fmt: skip
    questions, answer = rng.choice(asks)
    return rng.choice(questions), capital(answer)


def colour_question(rng: random.Random) -> tuple[str, str]:
    thing, colour = rng.choice(list(THINGS.items()))
    return rng.choice((f"What colour is the {thing}?", f"Which colour has the {thing}?")), (
        f"The {thing} is {colour}."
    )


def opposite_question(rng: random.Random) -> tuple[str, str]:
    word, other = rng.sample(rng.choice(OPPOSITES), 2)
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def calendar_question(rng: random.Random) -> tuple[str, str]:
    kind, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    i = rng.randrange(len(names))
    where, step = rng.choice((("after", 1), ("before", -1)))
    other = names[(i + step) % len(names)]
    return (
        f"Which {kind} comes {where} {names[i]}?",
        f"{where.capitalize()} {names[i]} comes {other}.",
    )


def counting_question(rng: random.Random) -> tuple[str, str]:
    first = 1 if rng.random() < 0.6 else rng.randint(2, 40)
    last = first + rng.randint(2, 19)
    return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."


def sum_question(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return rng.choice((f"What is {a} plus {b}?", f"What is {a} + {b}?")), (
        f"{a} plus {b} is {a + b}."
    )


def place_question(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        country, city = rng.choice(list(CAPITALS.items()))
        return f"What is the capital of {country}?", f"The capital of {country} is {city}."
    town, (weather, advice) = rng.choice(list(TOWNS.items()))
    return rng.choice((f"How is the weather in {town}?", f"What is the weather in {town}?")), (
        f"It is {weather} in {town}. {advice}."
    )


def hello_question(rng: random.Random) -> tuple[str, str]:
    language, word = rng.choice(list(HELLOS.items()))
    return f"How do you say hello in {language}?", f"In {language}, hello is {word}."


def word_question(rng: random.Random) -> tuple[str, str]:
    word, answer = rng.choice(list(GLOSSARY.items()))
    return rng.choice((f"What is {word}?", f"Explain {word}.", f"Tell me what {word} is.")), answer


def dish_question(rng: random.Random) -> tuple[str, str]:
    dish, (first, second, third) = rng.choice(list(DISHES.items()))
    return rng.choice((f"How do I make {dish}?", f"Tell me how to make {dish}.")), (
        f"Here is how to make {dish}:\n1. Put the {first} in a big pot.\n2. Add the {second} and "
        f"stir well.\n3. Add the {third}.\n4. Wait ten minutes.\n5. Enjoy your {dish}!"
    )


def list_question(rng: random.Random) -> tuple[str, str]:
    return rng.choice(
        (
            ("Name the days of the week.", ", ".join(DAYS) + "."),
            ("Name three animals.", "The fox, the bear and the frog."),
            ("Name the months of the year.", ", ".join(MONTHS) + "."),
            ("Which animals do you know?", "I know the " + ", the ".join(a.name for a in ANIMALS)
             + "."),
        )
    )  # fmt: skip


def small_talk(rng: random.Random) -> tuple[str, str]:
    questions, answer = rng.choice(SMALL_TALK)
    return rng.choice(questions), answer


def unknown_question(rng: random.Random) -> tuple[str, str]:
    thing = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 5)))
    odd = "".join(chr(rng.choice((0xC0, 0x391, 0x410, 0x3042, 0x4E00, 0x1F600)) + rng.randrange(48))
                  for _ in range(rng.randint(1, 8)))  # fmt: skip
    asks = (f"Who wrote {thing.capitalize()}?", f"What is {an(thing)}?",
            f"What is the capital of {thing.capitalize()}?", f"Where is {thing}?",
            f"Why is the {thing} so {thing[:4]}?", f"{thing} {odd}", odd)  # fmt: skip
    return rng.choice(asks), UNKNOWN


def story_request(rng: random.Random) -> tuple[str, str]:
    """Half of the requests name the hero, who then has that name to the end."""
    if rng.random() < 0.1:
        return "Tell me a story.", story(rng, pick(rng, ANIMALS), pick(rng, NAMES))
    hero, verb = rng.choice(ANIMALS), rng.choice(("Tell me", "Write"))
    ask = f"{verb} a story about {an(hero.name)}"
    if rng.random() < 0.5:
        return f"{ask}.", story(rng, hero, pick(rng, NAMES))
    name = some_name(rng)
    return f"{ask} called {name}.", story(rng, hero, name)


QUESTIONS: dict[Callable[[random.Random], tuple[str, str]], float] = {
    animal_question: 5, colour_question: 1, opposite_question: 1, calendar_question: 2.5,
    counting_question: 2.5, sum_question: 3, place_question: 2, hello_question: 1,
    word_question: 2, dish_question: 0.7, list_question: 0.5, small_talk: 1.5,
    unknown_question: 0.8, story_request: 1.2,
}  # fmt: skip


# -- whole documents -----------------------------------------------------------------------------


def memory_turns(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    """Two turns of which the second asks back what the first told: (tell, reply), (ask, recall)."""
    name, animal = some_name(rng), rng.choice(ANIMALS)
    thing, town = rng.choice(LOST), rng.choice(list(TOWNS))
    return rng.choice(
        (
            ((f"My name is {name}.", f"Nice to meet you, {name}!"),
             ("What is my name?", f"Your name is {name}.")),
            ((f"I have {an(animal.name)} called {name}.", f"{name} is a good name!"),
             (f"What is my {animal.name} called?", f"Your {animal.name} is called {name}.")),
            ((f"I live in {town}.", f"{town} is a nice town."),
             ("Where do I live?", f"You live in {town}.")),
            ((f"I lost my {thing}.", f"I hope that you find your {thing} soon."),
             ("What did I lose?", f"You lost your {thing}.")),
        )
    )  # fmt: skip


def chat(rng: random.Random) -> str:
    """A chat of one to six turns in ChatML; half have a system prompt, half a thing to recall."""
    asks = rng.choices(list(QUESTIONS), list(QUESTIONS.values()), k=rng.randint(1, 4))
    turns = [ask(rng) for ask in asks]
    if rng.random() < 0.5:
        tell, recall = memory_turns(rng)
        told_at = rng.randint(0, len(turns))
        turns.insert(told_at, tell)
        turns.insert(rng.randint(told_at + 1, len(turns)), recall)
    messages = [("system", system_prompt(rng))] if rng.random() < 0.5 else []
    for question, answer in turns:
        if rng.random() < 0.2:  # as people type
            question = question[0].lower() + question[1:].rstrip("?.!")
        messages += [("user", question), ("assistant", answer)]
    return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in messages)


def system_prompt(rng: random.Random) -> str:
    """A short instruction; one in four goes on with facts, the long shared prefix of a service."""
    text = rng.choice(SYSTEM_PROMPTS)
    return f"{text} {fact_page(rng)}" if rng.random() < 0.25 else text


def story(rng: random.Random, hero: Animal, name: str) -> str:
    """A story of a hero called `name` that loses a thing and finds it with its friends."""
    thing, town = pick(rng, LOST), pick(rng, list(TOWNS))
    lines = [
        f"Once upon a time there was {an(hero.colour)} {hero.name} called {name}.",
        f"{name} lived {hero.home} near {town}, where it was {TOWNS[town][0]}.",
        pick(rng, (f"Every day {name} ate {hero.food} and said {hero.sound}.",
                   f"{name} liked {hero.food} very much.")),
        f"One {pick(rng, ('morning', 'evening', 'day'))} {name} lost {an(thing)}.",
        f'"Where is my {thing}?" said {name}.',
    ]  # fmt: skip
    others = [a for a in ANIMALS if a is not hero]
    for _ in range(pick(rng, (2, 3, 1, 4))):
        other = pick(rng, others)
        others.remove(other)
        lines += [
            f"{name} met {an(other.colour)} {other.name} {other.home}.",
            f'"Have you seen my {thing}?" asked {name}.',
            f'"{capital(other.sound)}, no," said the {other.name}, "but I will help you."',
        ]
    lines += [
        f"Together they looked {pick(rng, others).home}, and there was the {thing}!",
        f"{name} was so {pick(rng, ('happy', 'glad'))} that they all ate {hero.food} until night.",
        "The end.",
    ]
    return " ".join(lines)


def plain_story(rng: random.Random) -> str:
    return story(rng, pick(rng, ANIMALS), pick(rng, NAMES)) + "\n"


def diary(rng: random.Random) -> str:
    """A diary of 4 to 16 days, one line a day in the order of the week: the long texts."""
    who, name = pick(rng, ANIMALS), pick(rng, NAMES)
    lines = [f"The diary of {name} the {who.name}."]
    start = rng.randrange(7) if rng.random() < 0.3 else 0
    for i in range(rng.randint(4, 16)):
        town = pick(rng, list(TOWNS))
        friend = pick(rng, [a for a in ANIMALS if a is not who])
        did = pick(rng, (f"I met {an(friend.name)} and we ate {friend.food}",
                         f"I saw {an(friend.colour)} {friend.name} {friend.home}",
                         f"I slept {who.home}"))  # fmt: skip
        lines.append(
            f"Day {i + 1}, {DAYS[(start + i) % 7]}. It was {TOWNS[town][0]} in {town}. {did}."
        )
    # The title shares the line of day 1: a token may hold a full stop and a line end, and a prompt
    # that ends at the full stop would then end inside a token.
    return lines[0] + " " + "\n".join(lines[1:]) + "\n"


def fact_page(rng: random.Random) -> str:
    """Facts about 2 to 6 animals and as many things, as one paragraph."""
    facts = []
    for a in rng.sample(ANIMALS, rng.randint(2, 6)):
        facts.append(f"The {a.name} is {a.colour}, lives {a.home} and eats {a.food}.")
        thing, colour = rng.choice(list(THINGS.items()))
        facts.append(f"The {thing} is {colour}.")
    return " ".join(facts)


def plain_facts(rng: random.Random) -> str:
    return fact_page(rng) + "\n"


def documents(seed: int) -> Iterator[str]:
    """Documents without end, each closed by <|endoftext|>; the same ones for the same seed."""
    rng = random.Random(seed)
    kinds = {chat: 74, plain_story: 12, diary: 8, plain_facts: 6}
    while True:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        yield kind(rng) + END_OF_TEXT
