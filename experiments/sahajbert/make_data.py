"""Write the texts of the tiny profile, and labelled sentences for its two downstream tasks: Bengali of our own writing.

    python make_data.py .

Two sources, as in the public run: an encyclopedia and news. Sentences are patterns with names, places and numbers
put in by a seeded generator, so names are known (for entities), and so is what a piece of news is about.
"""

import json
import random
import sys
from pathlib import Path

PEOPLE = "রহিম করিম সালমা নাজমা অমল বিমল কমলা সুমন মিতা রিনা তানিয়া আরিফ জামাল শিউলি পলাশ অনিতা সুজন লতা হাসান ফারহানা".split()
PLACES = "ঢাকা কলকাতা চট্টগ্রাম সিলেট খুলনা রাজশাহী বরিশাল শিলিগুড়ি ময়মনসিংহ কুমিল্লা যশোর রংপুর হাওড়া দুর্গাপুর বগুড়া".split()
FIRMS = ["সোনালী কারখানা", "নবীন প্রকাশনী", "মেঘনা পরিবহন", "পদ্মা ব্যাংক", "সবুজ সংঘ", "আলো হাসপাতাল", "তারা বিদ্যালয়"]
RIVERS = "পদ্মা মেঘনা যমুনা তিস্তা গঙ্গা সুরমা কর্ণফুলী রূপসা".split()
FOODS = "ভাত মাছ ডাল সবজি মিষ্টি দই পিঠা খিচুড়ি আম কাঁঠাল".split()
MONTHS = "বৈশাখ জ্যৈষ্ঠ আষাঢ় শ্রাবণ ভাদ্র আশ্বিন কার্তিক পৌষ মাঘ ফাল্গুন চৈত্র".split()
NUMBERS = "দুই তিন চার পাঁচ ছয় সাত আট নয় দশ বারো পনেরো কুড়ি".split()

ENCYCLOPEDIA = [
    "{L} একটি পুরোনো শহর। শহরটি {R} নদীর তীরে গড়ে উঠেছে। এখানে {N} টি বড় বাজার আছে।",
    "{R} নদী {L} জেলার পাশ দিয়ে বয়ে যায়। বর্ষাকালে নদীতে অনেক জল থাকে। জেলেরা ভোরে মাছ ধরতে যায়।",
    "{F} বাংলার মানুষের প্রিয় খাবার। উৎসবের দিনে ঘরে ঘরে {F} তৈরি হয়। {L} অঞ্চলের {F} বিশেষ পরিচিত।",
    "{M} মাসে মাঠে নতুন ফসল আসে। কৃষকেরা সকাল থেকে কাজ করেন। {L} এলাকায় তখন মেলা বসে।",
    "{P} একজন লেখক ছিলেন। তিনি {L} শহরে জন্মেছিলেন। তাঁর লেখা {N} টি বই এখনও পড়া হয়।",
    "বাংলা ভাষায় স্বরবর্ণ ও ব্যঞ্জনবর্ণ আছে। শিশুরা প্রথমে বর্ণ শেখে। তারপর তারা ছোট ছোট শব্দ পড়ে।",
    "{L} শহরের গ্রন্থাগারে অনেক বই আছে। ছাত্রছাত্রীরা বিকেলে সেখানে পড়তে আসে। গ্রন্থাগারটি {N} তলা।",
    "সূর্য পূর্ব দিকে ওঠে আর পশ্চিম দিকে অস্ত যায়। দিনের শেষে পাখিরা বাসায় ফেরে। রাতে আকাশে তারা দেখা যায়।",
    "{R} নদীর উপর একটি সেতু আছে। সেতুটি {L} শহরকে গ্রামের সঙ্গে যুক্ত করেছে। প্রতিদিন বহু মানুষ পার হয়।",
    "{M} মাসের আবহাওয়া মনোরম। বাতাসে ফুলের গন্ধ থাকে। মানুষ {F} খেতে ভালোবাসে।",
]
NEWS = {
    "খেলা": [
        "{L} দল আজ {N} রানে জিতেছে। {P} সবচেয়ে বেশি রান করেছেন। দর্শকেরা মাঠে আনন্দ করেছে।",
        "ফুটবল ম্যাচে {P} {N} টি গোল করেছেন। খেলাটি {L} মাঠে হয়েছিল। পরের ম্যাচ শুক্রবার।",
        "{O} ক্লাবের হয়ে {P} সাঁতারে প্রথম হয়েছেন। প্রতিযোগিতায় {N} জন খেলোয়াড় ছিলেন।",
    ],
    "আবহাওয়া": [
        "{L} শহরে আজ ভারী বৃষ্টি হতে পারে। তাপমাত্রা কমে যাবে। জেলেদের {R} নদীতে যেতে মানা করা হয়েছে।",
        "{M} মাসের শুরুতে {L} অঞ্চলে ঝড় হয়েছে। বাতাসের বেগ বেশি ছিল। কাল আকাশ পরিষ্কার থাকবে।",
        "{L} এলাকায় ঘন কুয়াশা পড়েছে। {N} দিন শীত থাকবে। সকালে রোদ উঠবে না।",
    ],
    "অর্থনীতি": [
        "{O} এ বছর লাভ করেছে। {P} বলেন দাম আর বাড়বে না। বাজারে কেনাবেচা বেড়েছে।",
        "{L} বাজারে চালের দাম {N} টাকা বেড়েছে। ব্যবসায়ীরা চিন্তিত। {O} ঋণ দেবে বলেছে।",
        "{O} নতুন {N} শ কর্মী নেবে। বেতন বাড়ানো হয়েছে। {P} এই খবর জানিয়েছেন।",
    ],
    "শিক্ষা": [
        "{L} শহরে নতুন বিদ্যালয় খোলা হয়েছে। {P} সেখানে অঙ্ক পড়াবেন। ছাত্ররা খুব খুশি।",
        "পরীক্ষার ফল প্রকাশ হয়েছে। {P} প্রথম হয়েছে। {O} তাকে বৃত্তি দেবে।",
        "{O} গ্রামে {N} টি পাঠাগার করবে। শিক্ষকেরা বই বেছে দেবেন। পড়া শুরু হবে {M} মাসে।",
    ],
}
FILLS = {"P": PEOPLE, "L": PLACES, "O": FIRMS, "R": RIVERS, "F": FOODS, "M": MONTHS, "N": NUMBERS}
ENTITIES = {"P": "PER", "L": "LOC", "O": "ORG"}


def filled(pattern: str, rng: random.Random) -> tuple[list[str], list[str]]:
    """A pattern's words with names put in, and which of them are entities."""
    words, tags = [], []
    for word in pattern.replace("।", " ।").split():
        key = word[1] if word.startswith("{") else ""
        chosen = rng.choice(FILLS[key]).split() if key else [word]
        words += chosen
        kind = ENTITIES.get(key, "")
        tags += [f"{'I' if number else 'B'}-{kind}" if kind else "O" for number in range(len(chosen))]
    return words, tags


def text_of(words: list[str]) -> str:
    """Words as a text."""
    return " ".join(words).replace(" ।", "।")


def main(folder: Path, texts_per_source: int = 3000, labelled: int = 800) -> None:
    """Write it all."""
    rng = random.Random(2021)
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    news = [(pattern, topic) for topic, patterns in NEWS.items() for pattern in patterns]
    for name, patterns in (("encyclopedia", ENCYCLOPEDIA), ("news", [pattern for pattern, _ in news])):
        with (folder / "texts" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(texts_per_source):
                texts = [text_of(filled(rng.choice(patterns), rng)[0]) for _ in range(rng.randint(1, 3))]
                file.write(json.dumps({"text": " ".join(texts)}, ensure_ascii=False) + "\n")
    with (folder / "downstream.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(labelled):
            pattern, topic = rng.choice(news)
            words, tags = filled(pattern, rng)
            file.write(json.dumps({"words": words, "tags": tags, "topic": topic}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
