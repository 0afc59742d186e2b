"""The small world that the tiny model knows: tables and two word helpers, written for this project.

`tiny_corpus` turns them into text. Words outside ASCII (greetings, animal faces) are here on
purpose: the tokenizer has no merges for them, so one character takes several tokens.
"""

from typing import NamedTuple


class Animal(NamedTuple):
    """What the world knows about one kind of animal."""

    name: str
    colour: str
    legs: str
    food: str
    home: str
    sound: str
    emoji: str


ANIMALS = [
    Animal("fox", "red", "four", "berries", "in the wood", "yip", "🦊"),
    Animal("bear", "brown", "four", "honey", "in a cave", "grr", "🐻"),
    Animal("frog", "green", "four", "flies", "in the pond", "croak", "🐸"),
    Animal("duck", "yellow", "two", "seeds", "on the river", "quack", "🦆"),
    Animal("owl", "grey", "two", "mice", "in the old oak", "hoot", "🦉"),
    Animal("cow", "white", "four", "grass", "on the farm", "moo", "🐮"),
    Animal("cat", "black", "four", "fish", "in the house", "meow", "🐱"),
    Animal("bee", "golden", "six", "nectar", "in the hive", "buzz", "🐝"),
    Animal("crab", "orange", "ten", "shrimp", "on the beach", "click", "🦀"),
    Animal("whale", "blue", "no", "krill", "in the sea", "wooo", "🐳"),
    Animal("pig", "pink", "four", "apples", "in the barn", "oink", "🐷"),
    Animal("horse", "tan", "four", "oats", "in the field", "neigh", "🐴"),
]
THINGS = {
    "sky": "blue", "grass": "green", "snow": "white", "coal": "black", "honey": "golden",
    "fire": "orange", "milk": "white", "mud": "brown", "rose": "red", "lemon": "yellow",
    "fog": "grey", "night": "black",
}  # fmt: skip
OPPOSITES = [
    ("big", "small"), ("hot", "cold"), ("fast", "slow"), ("happy", "sad"), ("day", "night"),
    ("up", "down"), ("old", "young"), ("wet", "dry"), ("loud", "quiet"), ("hard", "soft"),
    ("open", "closed"), ("full", "empty"),
]  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana",
}  # fmt: skip
HELLOS = {
    "French": "salut", "Spanish": "buenos días", "German": "grüß dich", "Greek": "γεια", "Russian":
    "привет", "Japanese": "こんにちは", "Chinese": "你好", "Korean": "안녕", "Hindi": "नमस्ते",
}  # fmt: skip
TOWNS = {
    "Windhill": ("windy", "Take a kite"), "Snowmere": ("cold", "Take a coat"),
    "Sunport": ("sunny", "Take a hat"), "Mistvale": ("foggy", "Take a lamp"),
    "Oakford": ("rainy", "Take an umbrella"), "Lakeside": ("warm", "Take a boat"),
}  # fmt: skip
GLOSSARY = {
    "a token": "A token is a small piece of text that the model reads as one number.",
    "a prompt": "A prompt is the text that you give to the model before it writes.",
    "prefill": "Prefill is the first pass: the model reads the whole prompt and fills the cache.",
    "decode": "Decode is the loop that writes the answer, one token at a time.",
    "a KV cache": "A KV cache keeps the keys and values of old tokens, so that they are not "
    "computed again.",
    "a block": "A block is a page of the KV cache that holds the keys and values of a few tokens.",
    "a block table": "A block table lists the blocks of one request, in the order of its tokens.",
    "a batch": "A batch is a group of requests that take the same step together.",
    "continuous batching": "Continuous batching lets new requests join the batch at every step.",
    "chunked prefill": "Chunked prefill reads a long prompt in parts, so that others can go on.",
    "a scheduler": "A scheduler chooses which requests run in the next step.",
    "preemption": "Preemption takes the blocks of one request away, so that another can go on.",
    "a prefix hit": "A prefix hit finds the start of a prompt in the cache and skips that work.",
    "greedy decoding": "Greedy decoding always takes the token with the highest score.",
}
DISHES = {
    "soup": ("water", "carrots", "salt"), "bread": ("flour", "yeast", "water"),
    "tea": ("water", "mint", "honey"), "pancakes": ("milk", "eggs", "flour"),
    "jam": ("berries", "sugar", "lemon"),
}  # fmt: skip
SMALL_TALK = [
    (("Hello!", "Hi!", "Hi there.", "Good morning!", "Hello", "Hey"),
     "Hello! How can I help you today?"),
    (("How are you?", "Are you well?", "How do you feel?"), "I am well, thank you. And you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
     "I am Tandem, a tiny model. I live in a small file and I know a small world."),
    (("What can you do?", "Can you help me?", "What do you know?"),
     "I can talk about animals, colours, numbers, towns and days. I can also tell you a story."),
    (("Thank you!", "Thanks.", "Thanks a lot!"), "You are welcome!"),
    (("Goodbye!", "Bye.", "See you!"), "Goodbye! Come back soon."),
]  # fmt: skip
UNKNOWN = "I do not know that yet. Ask me about animals, colours, numbers or towns."
SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are Tandem, a tiny and friendly model.",
    "Answer in short sentences.", "You are a teacher. Be kind and clear.",
]  # fmt: skip
DAYS = [
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
]  # fmt: skip
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
]  # fmt: skip
NAMES = [
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gwen", "Hugo", "Ida", "Jack", "Kim", "Leo",
    "Mia", "Ned", "Olga", "Pip", "Rosa", "Sam",
]  # fmt: skip
LOST = ["bell", "key", "map", "lamp", "drum", "hat", "boat", "kite"]
SYLLABLES = [
    "ba", "ko", "mi", "ru", "ten", "la", "vo", "sha", "pi", "dor", "ne", "zu", "gal", "fi",
]  # fmt: skip


def an(noun: str) -> str:
    """The noun with its indefinite article: "a fox", "an owl"."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def capital(text: str) -> str:
    """The text with its first letter in upper case and the rest untouched."""
    return text[0].upper() + text[1:]
