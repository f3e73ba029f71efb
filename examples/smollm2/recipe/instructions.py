"""Instructions for a chat model: topics x tasks, and tasks with a passage of the standard library's documentation.

    python examples/smollm2/recipe/instructions.py --out train.jsonl --count 4000
    python examples/smollm2/recipe/instructions.py --held-out examples/smollm2/prompts.jsonl

Nothing is downloaded. Every category has topics and modules that are held out: no instruction to train on names one of
them, and the prompts to measure on name no others. A line is {"category", "prompt"}.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
from pathlib import Path

TOPICS = """the water cycle; volcanoes; photosynthesis; black holes; the Roman Empire; jazz music; chess; bicycles; coffee;
the human heart; electric cars; the stock market; gardening; solar panels; the French Revolution; whales; sleep; glaciers;
the printing press; vaccines; basketball; bread baking; the moon; bees; the Great Wall of China; time management; robots;
yoga; the internet; rainforests; plate tectonics; Shakespeare; the immune system; dinosaurs; recycling; tea; earthquakes;
the Olympic Games; public speaking; the periodic table; sharks; mountain climbing; the Silk Road; painting; inflation;
job interviews; penguins; the nervous system; trains; cheese; meditation; the Amazon river; gravity; democracy; owls;
personal budgets; the Renaissance; swimming; lightning; libraries; honey; the Industrial Revolution; DNA; kites; museums;
smartphones; tornadoes; ancient Egypt; running a marathon; chocolate; the ozone layer; learning a language; wolves; poetry;
nuclear power; the Cold War; elephants; photography; fasting; astronomy; the heart of a city; friendship; noise; carbon;
oceans; batteries; the violin; remote work; stars; customer service; the Vikings; cats; diabetes; opera; tides; deserts;
the steam engine; salt; healthy breakfasts; rivers; memory; planning a trip; small businesses; winter; the equator; maps;
tennis; folk tales; clouds; the theory of evolution; good manners; cooking rice; a first apartment; school uniforms""".split(";")
HELD_OUT_TOPICS = """coral reefs; the violin maker Stradivari; hiking boots; the Aztec Empire; lighthouses; sourdough;
Mars; electric guitars; hummingbirds; negotiating a salary; origami; the Suez Canal; allergies; public transport;
snow leopards; typewriters""".split(";")
TOPICS, HELD_OUT_TOPICS = ([" ".join(topic.split()) for topic in topics] for topics in (TOPICS, HELD_OUT_TOPICS))

TASKS = {
    "chat": """What is interesting about {t}?; Explain {t} to a ten year old.; Why does {t} matter?; I know nothing about {t}. Where do I begin?;
Tell me a short story about {t}.; What are common misunderstandings about {t}?; How has {t} changed over time?;
Write a friendly email to a colleague about {t}.; What would you ask an expert on {t}?; Give me advice on {t}.;
Compare {t} with something similar.; What are the advantages and disadvantages of {t}?; Describe {t} in two paragraphs.;
Write a dialogue between two friends about {t}.; Can you help me understand {t}?; Write a poem about {t}.""",
    "list": """List ten facts about {t}.; Give me five tips about {t}, numbered.; Make a checklist for {t}.; List the most important words about {t} with a short definition each.;
What are the steps to learn about {t}? Answer with a numbered list.; Write a table of contents for a book about {t}.;
Name seven questions about {t}.; Give a bullet list of pros and cons of {t}.; Make a weekly plan about {t}, one line a day.""",
    "json": """Describe {t} as a JSON object with the keys "name", "category" and "facts".; Give me a JSON array of five objects about {t}, each with "title" and "description".;
Write a JSON object with three questions and answers about {t}.; Return a JSON object with the keys "topic", "summary" and "keywords" about {t}.;
Make a quiz about {t} in JSON: a list of questions, each with four options and the correct answer.""",
    "code": """Write a Python class that models {t}.; Write a Python function that prints facts about {t} from a dictionary.;
Write a small HTML page about {t}.; Write a Python program that asks the user questions about {t} and counts the right answers.;
Write an SQL table for data about {t} and three queries.; Write a Python function with a docstring that sorts a list of records about {t}.;
Write unit tests in Python for a function about {t}.; Write a JavaScript function that shows a list about {t}.""",
    "rewrite": """Rewrite this more formally: "Hey, I really like {t} and think you should check it out, it's super cool."; Correct the grammar: "Me and him was talking about {t}, it are very interesting for learn."
; Make this sentence shorter: "It is a well known fact, which many people have talked about for a long time, that {t} is something that one could describe as important."; Rewrite as a question: "Many people are interested in {t}.";
Turn these notes into a paragraph: {t}; why it matters - history - an example - conclusion.; Rewrite this for a child: "The study of {t} requires considerable attention to detail and to its historical context.\"""",
    "translate": """Translate into French: "I would like to learn more about {t}."; Translate into Spanish: "Today we talk about {t}, and tomorrow about something else.";
Translate into German: "The book about {t} is on the table."; Translate into Italian: "My friend told me a story about {t}."; How do you say "{t}" in French, Spanish and German?""",
}
PASSAGES = {
    "summarise": """Summarise this text in two sentences:; What is this text about?; Give the three most important points of this text:; Write a headline and a one-sentence summary for:""",
    "rewrite": """Rewrite this text in simple words:; Correct and improve this text, keep its meaning:; Repeat this text, with every sentence on a line of its own:; Rewrite this text as a list of bullet points:""",
    "code": """Explain what this code does:; Add type hints and a docstring to this code:; Rename the variables of this code to longer names:; Write a test for this code:""",
    "list": """List the terms that this text defines:; Make a numbered list of what this text says:""",
    "json": """Turn this text into a JSON object with "title", "summary" and "keywords":""",
}
MODULES = """string random datetime collections itertools functools os pathlib re math decimal fractions bisect
copy pprint enum shutil glob fnmatch tempfile pickle sqlite3 gzip bz2 hashlib hmac secrets calendar locale gettext logging
getpass platform queue sched contextvars subprocess select signal mmap email html urllib http ftplib smtplib uuid socketserver
unittest doctest pdb timeit cProfile trace warnings contextlib abc atexit traceback gc inspect site code codecs unicodedata
numbers cmath operator difflib shelve dbm configparser netrc plistlib cmd shlex tarfile lzma base64 binascii quopri mailbox
mimetypes wave colorsys turtle ast symtable token tokenize tabnanny pyclbr compileall dis pickletools""".split()
HELD_OUT_MODULES = "argparse csv heapq textwrap statistics json dataclasses threading asyncio zipfile".split()


def passages(modules: list[str], *, code: bool) -> list[str]:
    """Documentation, or source, of the public functions and classes of modules: 200 to 900 characters each."""
    found = []
    for name in modules:
        module = importlib.import_module(name)
        for key, thing in sorted(vars(module).items()):
            if key.startswith("_") or getattr(thing, "__module__", None) != name:
                continue
            try:
                text = inspect.getsource(thing) if code else inspect.getdoc(thing)
            except (OSError, TypeError):
                continue
            if text and 200 <= len(text) <= 900:
                found.append(text.strip())
    return found


def tasks(listing: str) -> list[str]:
    """The tasks of a listing."""
    return [" ".join(task.split()) for task in listing.split(";") if task.strip()]


def instructions(topics: list[str], modules: list[str], rng: random.Random) -> dict[str, list[str]]:
    """Every instruction there is about these topics and modules, by category, in random order."""
    made: dict[str, list[str]] = {}
    for category, listing in TASKS.items():
        made[category] = [task.replace("{t}", topic) for task in listing_tasks(listing) for topic in topics]
    for category, listing in PASSAGES.items():
        texts = passages(modules, code=category == "code")
        made.setdefault(category, []).extend(f"{task}\n\n{text}" for task in tasks(listing) for text in texts)
    for listed in made.values():
        rng.shuffle(listed)
    return made


def listing_tasks(listing: str) -> list[str]:
    """Tasks with a topic; a fragment that lost its topic to a semicolon belongs to the task before it."""
    whole: list[str] = []
    for task in tasks(listing):
        if "{t}" in task:
            whole.append(task)
        else:
            whole[-1] += f"; {task}"
    return whole


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=4000, help="instructions, as many of every category")
    parser.add_argument("--held-out", type=Path, help="write the prompts to measure on here instead")
    options = parser.parse_args()
    rng = random.Random(0)
    if options.held_out:
        made, count = instructions(HELD_OUT_TOPICS, HELD_OUT_MODULES, rng), 8
        made = {category: made[category][:count] for category in made}
    else:
        made = instructions(TOPICS, MODULES, rng)
        made = {category: made[category][: options.count // len(made)] for category in made}
    rows = [{"category": category, "prompt": prompt} for category, listed in made.items() for prompt in listed]
    if not options.held_out:
        rng.shuffle(rows)
    (options.held_out or options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} instructions: " + ", ".join(f"{category} {len(listed)}" for category, listed in made.items()))


if __name__ == "__main__":
    main()
