"""Templated training prompts of our own, over many kinds of task.

They are mixed with prompts that the target invents itself (``corpus.py``). None of them is taken from a benchmark: the
question files of the paper's six task sets are for evaluation only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# fmt: off
TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "volcanoes", "the Roman Empire", "the French Revolution",
    "the stock market", "inflation", "interest rates", "supply and demand", "machine learning", "neural networks",
    "databases", "operating systems", "the internet", "encryption", "blockchain", "solar panels", "wind turbines",
    "electric cars", "batteries", "recycling", "climate change", "rainforests", "coral reefs", "whales", "honeybees",
    "penguins", "elephants", "octopuses", "migratory birds", "dogs", "cats", "horses", "gardening", "composting",
    "baking bread", "brewing coffee", "green tea", "chocolate", "cheese making", "vegetarian cooking", "sushi",
    "street food", "healthy breakfasts", "sleep", "meditation", "yoga", "running a marathon", "cycling", "swimming",
    "chess", "football", "basketball", "tennis", "mountain climbing", "camping", "photography", "oil painting",
    "sculpture", "jazz", "classical music", "learning the guitar", "the piano", "opera", "ballet", "film noir",
    "science fiction", "detective novels", "poetry", "Shakespeare", "Greek mythology", "Norse mythology",
    "ancient Egypt", "the Silk Road", "the Renaissance", "the Industrial Revolution", "the space race", "Mars",
    "the Moon", "comets", "telescopes", "microscopes", "DNA", "evolution", "vaccines", "antibiotics", "the heart",
    "the human brain", "vitamins", "allergies", "first aid", "public speaking", "job interviews", "writing a resume",
    "time management", "remote work", "team meetings", "leadership", "negotiation", "small businesses", "marketing",
    "customer service", "budgeting", "saving money", "taxes", "insurance", "renting an apartment", "buying a house",
    "home repairs", "plumbing", "carpentry", "knitting", "sewing", "fashion", "architecture", "bridges", "railways",
    "airplanes", "sailing", "submarines", "lighthouses", "deserts", "glaciers", "earthquakes", "hurricanes",
    "the weather", "maps", "languages", "learning Spanish", "learning Japanese", "grammar", "libraries", "museums",
    "schools", "universities", "online courses", "homework", "friendship", "parenting", "weddings", "birthdays",
    "travel in Italy", "travel in Japan", "New York City", "London", "Paris", "small villages", "farming", "fishing",
    "probability", "prime numbers", "fractions", "geometry", "calculus", "statistics", "logic puzzles", "algorithms",
    "sorting", "recursion", "version control", "unit testing", "web design", "mobile apps", "video games", "robots",
    "drones", "3D printing", "virtual reality", "social media", "privacy", "newspapers", "elections", "democracy",
    "human rights", "philosophy", "ethics", "happiness", "courage", "creativity", "memory", "habits", "curiosity",
)
PEOPLE = (
    "a lonely robot", "an old sailor", "a young scientist", "a curious child", "a retired teacher", "a lost dog",
    "a brave mouse", "a travelling musician", "a baker", "a detective", "a dragon who is afraid of fire", "two sisters",
    "a gardener", "an astronaut", "a librarian", "a king without a crown", "a clockmaker", "a nurse", "a fisherman",
    "a painter", "a taxi driver", "a ghost", "an inventor", "a shepherd", "a pilot", "a tailor", "a group of friends",
)
PLACES = (
    "in a small harbour town", "on a distant planet", "in a snowed-in cabin", "at a busy train station", "in a desert",
    "in an old library", "on an island", "in a crowded market", "during a long winter", "in the year 2200",
    "in a village by the sea", "deep in the forest", "in a big city at night", "on a mountain", "in a quiet museum",
)
AUDIENCES = (
    "a ten-year-old", "a beginner", "a busy manager", "a university student", "my grandmother", "a new employee",
    "an expert", "a tourist", "a class of teenagers", "someone who has never heard of it",
)
TONES = ("friendly", "formal", "funny", "serious", "enthusiastic", "calm", "persuasive", "simple", "poetic", "polite")
CODE_TASKS = (
    "reverses a string", "checks whether a number is prime", "computes the factorial of n", "finds the largest element of a list",
    "counts the vowels in a sentence", "merges two sorted lists", "removes duplicates from a list", "sorts a list of tuples by the second item",
    "computes the n-th Fibonacci number", "checks whether a string is a palindrome", "converts Celsius to Fahrenheit",
    "finds the greatest common divisor of two numbers", "counts how often each word occurs in a text", "flattens a nested list",
    "reads a CSV file and prints the rows", "writes a dictionary to a JSON file", "performs a binary search", "implements bubble sort",
    "implements a stack with push and pop", "implements a queue", "computes the average of a list of numbers", "finds the second largest number in an array",
    "transposes a matrix", "multiplies two matrices", "validates an email address", "generates a random password",
    "computes the sum of the digits of an integer", "checks whether two strings are anagrams", "rotates a list by k places",
    "finds all pairs in a list that sum to a target", "converts a Roman numeral to an integer", "prints a multiplication table",
    "returns the longest word in a sentence", "groups a list of words by their first letter", "computes compound interest",
    "finds the missing number in a sequence from 1 to n", "converts a decimal number to binary", "counts the lines of a text file",
    "returns the intersection of two lists", "capitalises the first letter of each word", "computes the distance between two points",
    "implements a linked list with insert and delete", "traverses a binary tree in order", "computes the power of a number without using the built-in operator",
    "splits a list into chunks of size n", "finds the most common element", "checks whether brackets are balanced", "computes the median of a list",
    "returns all even numbers of a list", "replaces every space in a string with an underscore", "computes the running total of a list",
    "draws a triangle of stars", "simulates rolling two dice", "checks if a year is a leap year", "sorts a dictionary by value",
)
CODE_LANGUAGES = ("Python", "Python", "Python", "Python", "JavaScript", "Java", "C++", "C", "Go", "Rust")
NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona", "Noah", "Olga", "Peter", "Rosa", "Sam", "Tina", "Yusuf")
ITEMS = ("apples", "pencils", "stamps", "marbles", "books", "tickets", "cookies", "flowers", "cards", "shells", "eggs", "bottles", "chairs", "coins", "stickers", "boxes")
PHRASES = (
    "The meeting was moved from Monday to Thursday because two people were ill.",
    "The old bridge was closed last week after engineers found cracks in one of its pillars.",
    "Our new café opens at seven and serves fresh bread, soup and coffee from local farms.",
    "The museum shows more than two hundred paintings by artists who lived near the river.",
    "Scientists measured the temperature of the lake every day for ten years and saw it rise by one degree.",
    "The library will stay open until midnight during the exam weeks, and students may borrow laptops.",
    "A storm knocked down several trees in the park, but nobody was hurt and the paths are open again.",
    "The company sold fewer phones this year, yet its profit grew since it spent less on advertising.",
    "She learned to play the violin at the age of sixty and now performs with a small orchestra.",
    "The recipe needs three eggs, two cups of flour, a little salt and half a litre of milk.",
    "Farmers in the valley share one tractor and plan their harvest together every August.",
    "The train was late, so we missed the ferry and spent the night in a small hotel near the harbour.",
)
QUESTIONS = (
    "Why is {t} important?", "How does {t} work?", "What are the main ideas behind {t}?", "Who should learn about {t}?",
    "What is the history of {t}?", "What are common mistakes people make with {t}?", "What do most people get wrong about {t}?",
    "What is the best way to start with {t}?", "Can you tell me something surprising about {t}?", "Is {t} difficult to understand?",
    "What would the world be like without {t}?", "How has {t} changed in the last fifty years?", "What questions should I ask about {t}?",
    "When did people first become interested in {t}?", "What is the difference between {t} and {u}?", "How are {t} and {u} related?",
)
# fmt: on


def _chat(r: random.Random) -> str:
    return r.choice(QUESTIONS).format(t=r.choice(TOPICS), u=r.choice(TOPICS))


def _explain(r: random.Random) -> str:
    return r.choice(
        (
            "Explain {t} to {a}.",
            "Give a short introduction to {t} for {a}.",
            "Describe {t} in a {o} tone.",
            "Write two paragraphs about {t}.",
            "What should {a} know about {t}?",
            "Discuss the advantages and disadvantages of {t}.",
            "Give me an overview of {t}. Be {o}.",
            "Write an essay about {t} and its effect on daily life.",
            "Teach me about {t} with an example.",
            "Argue for and against {t} in public life.",
        )
    ).format(t=r.choice(TOPICS), a=r.choice(AUDIENCES), o=r.choice(TONES))


def _list(r: random.Random) -> str:
    return r.choice(
        (
            "List {n} facts about {t}.",
            "Give me {n} tips about {t}.",
            "Name {n} things that people associate with {t}.",
            "Write a step-by-step guide to {t}.",
            "Make a table with two columns that compares {t} and {u}.",
            "Suggest {n} titles for a book about {t}.",
            "Write {n} quiz questions about {t} with answers.",
            "What are the top {n} reasons to care about {t}?",
            "Make a checklist for a project on {t}.",
            "Plan a {n}-day course on {t}, one line for each day.",
            "Give {n} examples of how {t} appears in everyday life, as bullet points.",
        )
    ).format(t=r.choice(TOPICS), u=r.choice(TOPICS), n=r.randint(3, 10))


def _story(r: random.Random) -> str:
    return r.choice(
        (
            "Write a short story about {p} {q}.",
            "Tell me a {o} story about {p} and {t}.",
            "Write a poem about {t}.",
            "Write a dialogue between {p} and {p2} {q}.",
            "Begin a novel about {p} {q}.",
            "Write a diary entry of {p} {q}.",
            "Write a song about {t} in a {o} tone.",
            "Describe a scene {q} in which {p} learns about {t}.",
            "Write a fable with a moral about {t}.",
            "Imagine that you are {p}. Tell us about your day {q}.",
        )
    ).format(p=r.choice(PEOPLE), p2=r.choice(PEOPLE), q=r.choice(PLACES), t=r.choice(TOPICS), o=r.choice(TONES))


def _letter(r: random.Random) -> str:
    return r.choice(
        (
            "Write a {o} email to my boss about {t}.",
            "Write a {o} letter to {p} about {t}.",
            "Write a blog post about {t} for {a}.",
            "Write a product description for something related to {t}.",
            "Write a {o} speech about {t}.",
            "Write a review of a course on {t}.",
            "Write an invitation to an event about {t}.",
            "Write a news report about {t} {q}.",
            "Draft a proposal for a workshop on {t}, with a budget and a schedule.",
            "Write social media captions about {t} in a {o} tone.",
        )
    ).format(o=r.choice(TONES), t=r.choice(TOPICS), p=r.choice(PEOPLE), a=r.choice(AUDIENCES), q=r.choice(PLACES))


def _code(r: random.Random) -> str:
    task, language = r.choice(CODE_TASKS), r.choice(CODE_LANGUAGES)
    return r.choice(
        (
            "Write a {l} function that {c}.",
            "Write a {l} program that {c}.",
            "In {l}, how do I write code that {c}? Explain each step.",
            "Show me {l} code that {c}, with comments and an example.",
            "Give two different {l} functions. Each {c}.",
            "Write a {l} function that {c}, and then write tests for it.",
            "Write a {l} class with a method that {c}.",
            'Complete this function:\n\ndef solution(x):\n    """A function that {c}."""\n',
            "What is the time complexity of a function that {c}? Show the {l} code.",
        )
    ).format(l=language, c=task)


def _other_code(r: random.Random) -> str:
    return r.choice(
        (
            "Write an SQL query that lists all {i} sold by {n} in the last month.",
            "Write an HTML page about {t} with a heading, a list and a table.",
            "Write a CSS rule that styles a page about {t}.",
            "Write a bash script that counts files whose name contains {i}.",
            "Give an example of a JSON document that describes {t}.",
            "Write a regular expression that matches the names of {i}, and explain it.",
            "Design the database tables for an app about {t}.",
            "Write a README for a Python package about {t}.",
        )
    ).format(t=r.choice(TOPICS), i=r.choice(ITEMS), n=r.choice(NAMES))


def _arithmetic(r: random.Random) -> str:
    a, b, c = r.randint(2, 60), r.randint(2, 40), r.randint(2, 12)
    return r.choice(
        (
            "{n} has {a} {i} and buys {b} more. How many {i} does {n} have now?",
            "{n} had {d} {i} and gave {b} of them to {m}. How many are left? Show your steps.",
            "A box holds {c} {i}. How many {i} are in {b} boxes?",
            "{n} shares {e} {i} equally among {c} friends. How many does each get?",
            "What is {a} + {b}?",
            "What is {a} * {c}? Explain how you got it.",
            "Solve for x: {c}x + {a} = {f}",
            "A train travels {g} miles in {c} hours. What is its average speed?",
            "If one ticket costs ${c} and {n} buys {b}, how much does {n} pay? {m} pays half of that. How much is it?",
            "What is {k}% of {h}?",
            "Convert {a} kilometres to miles.",
            "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            "{n} reads {c} pages a day. The book has {e} pages. How many days does it take? Think step by step.",
            "{n} earns ${b} an hour and works {c} hours a day for 5 days. How much does {n} earn in a week?",
            "Write the next three numbers of the sequence {c}, {c2}, {c3}, {c4}.",
        )
    ).format(
        n=r.choice(NAMES), m=r.choice(NAMES), i=r.choice(ITEMS), a=a, b=b, c=c, d=a + b, e=c * b, f=c * b + a,
        g=c * a, h=a * 10, k=r.choice((5, 10, 20, 25, 50)), c2=2 * c, c3=3 * c, c4=4 * c,
    )  # fmt: skip


def _extract(r: random.Random) -> str:
    return r.choice(
        (
            "What is the capital of the country that is famous for {t}?",
            "Who invented the most important thing related to {t}?",
            "Define the word that best describes {t} in one sentence.",
            "Is this sentence positive or negative? \"{s}\"",
            "Correct the grammar of this sentence: \"{s}\"",
            "What is the main point of this sentence? \"{s}\"",
            "Turn this into a question: \"{s}\"",
            "Which words in this text are nouns? \"{s}\"",
        )
    ).format(t=r.choice(TOPICS), s=r.choice(PHRASES))  # fmt: skip


def _rewrite(r: random.Random, passages: list[str]) -> str:
    text = r.choice(passages) if passages and r.random() < 0.8 else " ".join(r.sample(PHRASES, 3))
    return r.choice(
        (
            "Summarize the following text:\n\n{s}",
            "Summarize this article in three sentences.\n\n{s}",
            "Rewrite the following text in a {o} tone:\n\n{s}",
            "Explain the following text to {a}:\n\n{s}",
            "Make a list of the key points of this text:\n\n{s}",
            "{s}\n\nWhat is this text about?",
            "Paraphrase this paragraph:\n\n{s}",
            "Write a headline and a short summary for this text:\n\n{s}",
            "Continue this text:\n\n{s}",
            "Edit this paragraph for clarity:\n\n{s}",
        )
    ).format(s=text, o=r.choice(TONES), a=r.choice(AUDIENCES))


def _word_problem(r: random.Random) -> str:
    """Several statements about quantities and one question: longer than `_arithmetic`."""
    n, m, o = r.sample(NAMES, 3)
    i, j = r.sample(ITEMS, 2)
    a, b, c, d = r.randint(3, 60), r.randint(2, 20), r.randint(2, 9), r.randint(2, 12)
    first = r.choice(
        (
            f"{n} has {a} {i}, and {m} has {c} times as many.",
            f"{n} sells {i} at the market for ${c} each and sold {a} of them on Monday.",
            f"Each week {n} makes {a} {i} and gives {b} of them to {m}.",
            f"A shop has {a} boxes with {b} {i} in each box.",
            f"{n} saves ${a} every month to buy {i} that cost ${a * d}.",
        )
    )
    second = r.choice(
        (
            f"Then {o} brings {b} more {i} and {d} {j}.",
            f"On the next day {m} finds {d} more than {o}, who found {b}.",
            f"Half of the {i} are red and the rest are blue.",
            f"After {d} days {o} takes {c} {i} away.",
            f"{m} pays ${d} for every pair of {j}, and {o} pays {b}% less.",
        )
    )
    third = r.choice(
        (
            f"How many {i} does {n} have in the end?",
            f"How many {i} are there altogether?",
            f"How much money does {n} have left after {c} weeks?",
            f"How many more {i} than {j} are there?",
            "What is the total cost?",
            "How many days does it take?",
        )
    )
    return f"{first} {second} {third}"


def _write_function(r: random.Random, snippets: list[str]) -> str:
    """Code to go on with: the beginning of an earlier answer's code, or a signature with a docstring."""
    if snippets and r.random() < 0.6:
        lines = r.choice(snippets).rstrip().split("\n")
        text = "\n".join(lines[: r.randint(2, max(2, len(lines) - 2))])
    else:
        task = r.choice(CODE_TASKS)
        name = "_".join(task.replace("-", " ").split()[:3])
        arguments = r.choice(("x", "values", "text", "numbers: list", "s: str", "n: int", "a, b", "items, k"))
        example = f"    >>> {name}({r.randint(1, 50)})\n    {r.randint(1, 99)}\n" if r.random() < 0.6 else ""
        text = f'def {name}({arguments}):\n    """This function {task}.\n{example}    """\n'
    return r.choice(
        ("Finish this code:\n\n{c}", "{c}\n\nComplete the function above.", "Continue the following code.\n```\n{c}\n```",
         "Write the body of this function.\n{c}", "What does this code do?\n\n{c}", "Please complete:\n{c}")
    ).replace("{c}", text)  # fmt: skip


def long_prompt(rng: random.Random, passages: list[str], snippets: list[str], tokens: int) -> tuple[str, str]:
    """``(kind, prompt)`` with an article, code to complete or a word problem; an article has at most ``tokens`` tokens.

    ``passages`` are texts of which articles are made (at least one), ``snippets`` pieces of code (may be empty).
    """
    kind = rng.choices(("article", "completion", "problem"), weights=(0.56, 0.26, 0.18))[0]
    if kind == "completion":
        return kind, _write_function(rng, snippets)
    if kind == "problem":
        return kind, _word_problem(rng)
    words = int(rng.uniform(0.2, 0.72) * tokens)
    parts: list[str] = []
    while sum(len(part.split()) for part in parts) < words:
        parts.append(rng.choice(passages))
    text = rng.choice((" ", "\n\n")).join(parts)
    return kind, rng.choice(
        (
            "Summarize this article:\n\n{s}", "Write a short summary of the following news story.\n\n{s}", "{s}\n\nTL;DR",
            "Give the main points of this text in three sentences: {s}", "{s}\n\nSummarize the text above.",
            "Summary of this document, please:\n{s}", "What is this article about? {s}", "Shorten this text: {s}",
            "Read the text and answer: what happened, and who took part?\n\n{s}", "Write a headline for this story: {s}",
        )
    ).replace("{s}", text)  # fmt: skip


# Kind -> (share of the templated prompts, maker).
KINDS: dict[str, tuple[float, Callable[[random.Random, list[str]], str]]] = {
    "chat": (0.12, lambda r, _: _chat(r)),
    "explain": (0.14, lambda r, _: _explain(r)),
    "list": (0.13, lambda r, _: _list(r)),
    "story": (0.13, lambda r, _: _story(r)),
    "letter": (0.12, lambda r, _: _letter(r)),
    "code": (0.13, lambda r, _: _code(r)),
    "markup": (0.03, lambda r, _: _other_code(r)),
    "arithmetic": (0.08, lambda r, _: _arithmetic(r)),
    "short": (0.03, lambda r, _: _extract(r)),
    "rewrite": (0.09, _rewrite),
}


def templated_prompt(rng: random.Random, passages: list[str]) -> tuple[str, str]:
    """Return ``(kind, prompt)``; ``passages`` are texts for the summary and rewriting tasks (may be empty)."""
    kind = rng.choices(list(KINDS), weights=[share for share, _ in KINDS.values()])[0]
    return kind, KINDS[kind][1](rng, passages)
