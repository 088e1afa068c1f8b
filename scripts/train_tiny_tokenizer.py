"""Train the tokenizers that come with Luthier: one on nothing but the skills data set and the page of prose below, and
a smaller one for each model that sees or hears, on the questions of its own data set and the same page.

    python scripts/train_tiny_tokenizer.py [FOLDER]

writes ``tokenizer.json`` and ``tokenizer_config.json`` into ``FOLDER/NAME`` of each preset that has them, by default
into the presets themselves; run again, it writes the same bytes. The smaller ones also take over the chat template.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from luthier.presets import dataset_rows, model_folder, tokenizer_folder

VOCAB_SIZE = 2048
MEDIA_VOCAB_SIZE = 480  # nearly every word of the questions has an id of its own
MEDIA_ROWS = {"tiny-qwen3-vl": "pictures", "tiny-qwen2-audio": "sounds"}
MODEL_MAX_LENGTH = 2048

# In the order of their ids, which follow the learned vocabulary.
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>",
)  # fmt: skip
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words with the space before them, single digits, runs of signs, line ends, spaces: the vocabulary is learned in these,
# so that no token joins a sign with a letter.
LEARNED_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# Texts are cut as Qwen2's tokenizer cuts them, which llama.cpp knows by the name "qwen2". With this vocabulary the ids
# differ only where a quoted word begins like the end of a contraction (as in 'there'), or at spaces between line ends.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PROSE = """
The valley has five villages, and a road that takes a day to walk from end to end. In the morning the bakers are up
first. Their windows are the only lights for an hour, and the smell of bread goes down the street before anyone can
see it. Then the doors open, the dogs come out, and the children count the geese on the pond, though the number is
always the same.

At the end of the road there is a workshop with a wide window. A luthier works there, someone who makes and mends
instruments with strings. On the wall hang the tools in their order: saws, planes, knives, files, clamps of every
size, and a pot of glue that should be warm but not hot. The wood stands in a corner and waits. Spruce is for the top,
because it is light and strong along the grain. Maple is for the back and the sides. It must be dry, and to become dry
it needs years, so a good maker buys wood for someone who will work in the room long after them.

People ask how such a thing is learned. The answer is that nobody learns all of it at once. First you learn to sharpen
a blade. When you think that it is sharp, you are told to begin again, and after a week you know why. Then you learn
to see a straight line, and then to hear one, for a board that is tapped with a finger tells you whether it is too
thick. You make mistakes, and the best of them are kept in a drawer, with a note that says what went wrong. A mistake
with its reason written down is worth more than a piece of good luck.

There is a rule in the workshop: measure what you have, write down what you measured, and never trust a number that
you cannot measure twice. If two numbers do not agree, one of them is wrong, and the work stops until it is known
which. The visitors find this slow. But the instruments that leave the house are in tune, and when one comes back
after many years, the old book says who made it, from which tree, on what day, and what was changed between the first
sound and the last.

In the evening there is music. Somebody brings a drum, somebody else a flute, and whoever has nothing can sing. They
play the songs of the valley, which are about rain, about the harvest, about a horse that could not be caught and a
man who would not stop trying. Nobody asks whether it is beautiful. They ask whether it is together: each player
listens to the others, comes in at the right moment, and is quiet when it is time to be quiet.

Questions are welcome here. What is this called? How does it work? Why is the bridge not glued? Where did you learn
that? When will it be ready? Which of the two is better, and who says so? If we know the answer, we give it in a few
words. If we do not know it, we say that we do not know, look it up, or use the right tool to find out. It is better
to answer "I am not sure" than to make something up, and it is better to think before the answer than after it.

Some things should be said about numbers and signs. A list is written with commas (one, two, three); a date may look
like 2024-05-17, a time like 18:30, a price like $4.50 or 12%. Code has its own signs: {"key": "value", "list": [1, 2,
3]}, x = (a + b) * c / 2; if i < 10 and not done: return None  # a comment. An address may be
https://example.com/page?id=7 or name@example.com. Names of files look like notes/today_1.txt. And then there are
words like can't, don't, it's, we'll, you've and they're, which are two words that live in one house.

Later, when the lamps are out, the workshop is not quite silent. The wood moves a little as the air becomes cool.
Under the bench a cat waits for a mouse, or for morning, whichever comes first. Tomorrow there will be new work: a
cello whose neck is loose, a harp that wants forty strings, a small violin for a small person who has just begun. They
will need patience, and so will everyone who lives next door.
"""

WORDS = """
able above accept across act actually add address afraid again against age agree ahead allow almost alone along
already also although among angry another appear area arm arrive art article attention aunt autumn away baby bad bag
ball bank base battle beach beat become behind believe belong below beside between beyond bird birth bit blood blow
boat body bone born bottle bottom bowl box boy brain branch brave breathe bright bring broken brother build burn
business busy buy cake call camp capital captain card care carry case catch cause cell center century certain chance
check cheap child choice choose church circle city claim class clean clear climb clock close cloth cloud coat coffee
cold collect command company compare complete computer condition consider contain continue control cook copy correct
cost cotton could country couple course cover create cross crowd cry culture current customer cut dance danger dark
data daughter dead deal dear death decide deep degree deliver depend describe desert design desk detail develop
different difficult dinner direction dirty discover discuss distance divide doctor dollar double doubt draw dream
dress drink drive drop during dust duty ear early earn earth east easy eat edge education effect effort egg either
electric else empty enemy energy engine enjoy enough enter equal escape especially even event ever every example
except excuse exercise expect experience explain eye face fact fail fair faith fall family famous far farm fast father
favourite fear feed feel fence fever few field fight figure fill final fine fire fish floor flow flower fly follow
food foot foreign forest forget forgive form forward free friend frighten front full fun function future game gather
general gentle gift girl glass goal gold government grass great ground group grow guard guess guest guide habit hair
half hand happen happy hate head health heart heat heavy help hide high hill history hit hold hole holiday home honest
honour hope hospital hotel however human hundred hungry hunt hurry hurt husband ice idea ill imagine important include
increase indeed industry inform inside instead interest invite iron issue job join joke journey joy judge jump just
keep key kill kind king kitchen knee knock knowledge language large laugh law lead leaf least leather leave left leg
lend less lesson letter level lie life lift likely limit line lip listen little load local lock lonely lose loud love
low luck lunch machine main manage map mark market marry master match material matter mean measure meat medicine meet
member memory message metal method middle might mile milk mind minute miss model modern money month mother mountain
mouth move murder narrow nation nature near necessary need neighbour neither nerve news nine noise north nose notice
nothing number object ocean offer office often oil once only open operate opinion orange order ordinary other ought
outside own page pain paint pair parent park part party pass past path pay peace pencil perfect perhaps period permit
person picture piece place plan plant plate please pleasure pocket poem point police polite poor popular position
possible post power practice pray prepare present press pretty prevent prince print prison private problem produce
product program promise proper protect proud prove provide public pull pupil pure push quality quarter queen quick
quite race radio raise reach read real really reason receive record reduce refuse regular remember repair repeat reply
report rest result return reward rice rich ride ring rise risk rough round rubber rule run sad safe sail same sand
save science sea search season seat secret seem sell send sense sentence separate serious serve seven several shade
shake shall shape share shelter shine ship shirt shoe shop shore shoulder shout shut sick side sight sign silver
similar simple since sister sit six skill skin skirt sky sleep slip smell smile smoke smooth social society soft soil
soldier solution solve son soon sorry soul soup south space speak special speech speed spend spoil spread spring
square stage stairs stamp start state station stay steal steam steel step stick still stomach store storm story
strange stream strike student study subject succeed sudden sugar suggest suit summer sun supply support sure surface
surprise swim system tail talk taste tax teach team tear test thank thick thief thing thousand throat through throw
thus ticket tie tired title together tongue tooth top total touch toward town trade train travel trouble true trust
try turn twice type ugly uncle under understand union unit until upon use useful usual value various vegetable victory
view visit voice vote wait wake walk war warm wash waste watch wave weak wealth wear wedding week weigh welcome west
wheel while whole wide wife wild win wing wise wish within without woman wonder worry worse wound wrap yard year yet
young zero calls writing
"""


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    tiny = tokenizer_folder("tiny")
    write_tokenizer(tiny if root is None else root / "tiny", train_tokenizer(VOCAB_SIZE, _texts()))
    for name, dataset in MEDIA_ROWS.items():
        folder = model_folder(name) if root is None else root / name
        write_tokenizer(folder, train_tokenizer(MEDIA_VOCAB_SIZE, _media_texts(dataset_rows(dataset, "train"))))
        shutil.copyfile(tiny / "chat_template.jinja", folder / "chat_template.jinja")


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Both files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    config = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    print(f"{folder}: {tokenizer.get_vocab_size()} ids")


def train_tokenizer(vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab_size`` ids, added tokens included, that can spell any text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = _words_by(LEARNED_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = _words_by(WORD_PATTERN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"{tokenizer.get_vocab_size()} ids were learned, {vocab_size} are wanted: give it more text")
    return tokenizer


def _words_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``; the chat template lies beside it in a file of its own."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
        "padding_side": "right",
    }


def _texts() -> Iterator[str]:
    yield PROSE
    yield WORDS
    for row in dataset_rows("skills", "train"):
        yield from _strings(row["messages"])
        yield from _strings(row.get("tools", []))


def _media_texts(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What is said in questions about pictures or sounds, and by whom; then the prose, for what is left of the ids."""
    for row in rows:
        for message in row["messages"]:
            content = message["content"]
            yield message["role"]
            yield content if isinstance(content, str) else content[-1]["text"]
    yield PROSE


def _strings(value: Any) -> Iterator[str]:
    """All strings of a row, and what is JSON for the model as JSON."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _strings(item)
        case {"type": "function", "function": {"parameters": _}}:
            yield json.dumps(value)
        case {"name": str(), "arguments": str(arguments)}:
            yield json.dumps({"name": value["name"], "arguments": json.loads(arguments)})
        case dict():
            for item in value.values():
                yield from _strings(item)
        case _:
            raise TypeError(f"a row holds {value!r}")


if __name__ == "__main__":
    main()
