"""Texts with labels: what is read, how it is encoded and kept, and the batches that a model is given."""

import re
from random import Random

import pytest

from concord.spec.batch import validate_batch
from concord.training import data
from concord.training.data import corpus as corpora
from concord.training.data.batching import order
from concord.training.data.lines import LONGEST, SHOWN
from tests.toys.surroundings import ROOT, python, refusal

PAIRS = (
    "谁有狂三这张高清的\t这张高清图，谁有\t0\n"
    "英雄联盟什么英雄最好\t英雄联盟最好英雄是什么\t1\n"
    '我想要一个"好"的\t我要\t1\n'
)
WORDS = "a film of rare beauty<SEP>good\nso dull so very dull<SEP>bad\n"
LINES = (
    '{"text": "so dull", "label": "bad"}\n{"sentence1": "a film", "sentence2": "a movie", "label": '
    '"good", "id": 7}\n{"text": "rare", "label": null}\n'
)


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# Formats.


QUESTIONS = [tuple(line.split("\t")) for line in PAIRS.splitlines()]
FILMS = [("a film of rare beauty", None, "good"), ("so dull so very dull", None, "bad")]
READ = [("so dull", None, "bad"), ("a film", "a movie", "good"), ("rare", None, None)]
FORMATS = [
    # Pairs as LCQMC has them, words with a label as the source in TensorFlow 1, and JSON under usual names.
    ("train.tsv", PAIRS, {}, QUESTIONS),
    ("bom.tsv", b"\xef\xbb\xbf" + PAIRS.replace("\n", "\r\n").encode(), {}, QUESTIONS),
    ("turned.tsv", "label\tsentence\n 1\tgut\n", {}, [("gut", None, "1")]),
    ("pairs.tsv", "a b\tc\n", {"columns": ["text_a", "text_b"]}, [("a b", "c", None)]),
    ("train.txt", WORDS, {}, FILMS),
    ("plain.txt", "one\n", {}, [("one", None, None)]),
    ("train.jsonl", LINES, {}, READ),
]


@pytest.mark.parametrize(("name", "content", "options", "expected"), FORMATS)
def test_a_file_of_texts_is_read_as_its_format_says(tmp_path, name, content, options, expected):
    path = written(tmp_path, name, content)
    samples = data.read(path, **options).samples
    assert [(sample.text_a, sample.text_b, sample.label) for sample in samples] == expected


COLUMNS = "has 1 columns but must have 3: text_a, text_b, label"
REFUSED = {
    "train.tsv": (
        b"a\tb\t1\nonly one\n\n\xff\tb\t1\n \tb\t1\nc\td\t0\n" + b"x" * (LONGEST + 1) + b"\ne\tf\t1\n",
        f"2: {COLUMNS}",
        f"3: {COLUMNS}",
        "4: is no text in utf-8: invalid start byte at byte 0",
        "5: 'text_a' is empty",
        f"7: has {LONGEST + 1} bytes but must have at most {LONGEST}",
    ),
    "many.tsv": (
        "a\t1\n" + "b\n" * (SHOWN + 3),
        *(f"{line}: has 1 columns but must have 2: text_a, label" for line in range(2, SHOWN + 2)),
        "and 3 more bad lines",
    ),
    "bad.jsonl": (
        '{"text": 3}\n{"label": 1}\n{"text": "a", "text_a": "b"}\n{"text": "x", "label": true}\n{\n',
        "1: 'text' is of type int but must be a string",
        "2: lacks 'text_a' (or 'text', 'sentence', 'sentence1')",
        "3: has 'text_a' beside another name of 'text_a'",
        "4: 'label' is of type bool but must be a string or a whole number",
        "5: not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_lines_are_refused_or_skipped_each_by_its_number(tmp_path, name):
    content, *problems = REFUSED[name]
    path = written(tmp_path, name, content)
    assert [line.removeprefix(f"{path}:") for line in refusal(data.read, path)] == problems
    if name == "train.tsv":
        found = data.read(path, path, on_error="skip")
        assert found.complaints.count == 2 * len(problems)
        # A number says in which file a line stands, and nothing of its content.
        numbers = [sample.number for sample in found.samples]
        assert numbers == [1, 6, 8, 2**32 + 1, 2**32 + 6, 2**32 + 8]
        assert found.where(numbers[-1]) == f"{path}:8"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"on_error": "ignore"}, "unknown --on-error 'ignore': must be one of fail, skip"),
        (
            {"columns": ["text_b"]},
            "columns are text_b but must be text_a and any of text_b, label, each once",
        ),
    ],
)
def test_options_that_say_nothing_are_refused(tmp_path, options, problem):
    assert refusal(data.read, written(tmp_path, "a.tsv", ""), **options) == [problem]


def test_datasets_of_hugging_face_are_read_from_their_folder(tmp_path):
    library = pytest.importorskip("datasets")
    text, label = library.Value("string"), library.ClassLabel(names=["unlike", "alike"])
    features = library.Features({"sentence1": text, "sentence2": text, "label": label})
    rows = {"sentence1": ["a", "b", " "], "sentence2": ["x", "y", "u"], "label": [1, -1, 1]}
    whole = library.DatasetDict({"train": library.Dataset.from_dict(rows, features=features)})
    whole.save_to_disk(str(tmp_path / "saved"))
    (folder,) = data.splits(tmp_path / "saved").values()
    found = data.read(folder, on_error="skip")
    assert [
        (sample.text_a, sample.text_b, sample.label, found.where(sample.number)) for sample in found.samples
    ] == [("a", "x", "alike", f"{folder}:1"), ("b", "y", None, f"{folder}:2")]
    assert found.complaints.listed() == [f"{folder}:3: 'text_a' is empty"]
    (arrow,) = folder.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert refusal(data.read, folder)[0].startswith(f"{folder}: cannot be read as a dataset: ")


def test_a_folder_that_is_no_dataset_says_so(tmp_path):
    assert refusal(data.read, tmp_path) == [
        f"{tmp_path}: is a folder but no dataset: 'dataset_info.json' and 'state.json' must be in it; "
        "a file of the folder can be given"
    ]
    assert refusal(data.splits, tmp_path)[0].startswith(
        f"{tmp_path}: has no train.tsv or train.jsonl or train.txt"
    )
    for name in ("validation.tsv", "train.tsv", "notes.md"):
        written(tmp_path, name, PAIRS)
    assert {split: path.name for split, path in data.splits(tmp_path).items()} == {
        "train": "train.tsv",
        "dev": "validation.tsv",
    }
    written(tmp_path, "dev.jsonl", LINES)
    assert refusal(data.splits, tmp_path) == [
        f"{tmp_path}: has dev.jsonl and validation.tsv but must have one dev"
    ]


# Labels.


def test_labels_are_numbered_in_a_stable_order(tmp_path):
    assert data.Labels.of(["10", "2", None, "2"]).names == ("2", "10")
    assert data.Labels.of(["b", "10", "a"]).names == ("10", "a", "b")
    path = written(tmp_path, "labels.json", data.Labels(("no", "yes")).to_json())
    assert data.Labels.read(path).names == ("no", "yes")
    assert refusal(data.Labels.of, ["a", "a"]) == [
        "labels are 'a' but there must be at least two classes to tell apart"
    ]
    assert "among them '7', but classes must be few" in refusal(data.Labels.of, map(str, range(7, 30)))[0]
    path.write_text('{"format": "concord.labels/1", "names": ["a", "a"]}')
    assert refusal(data.Labels.read, path) == [
        f"{path}: labels are 'a', 'a' but each must be there once, and none be empty"
    ]


def test_a_label_that_training_did_not_have_is_a_bad_line(tmp_path, small):
    labels, encoder = data.Labels(("a", "b")), encoder_of(small())
    dev = written(tmp_path, "dev.tsv", "x\tc\ny\tb\n")
    found = data.read(dev, on_error="skip")
    assert data.encode(found, encoder, labels).labels.tolist() == [1]
    assert found.complaints.listed() == [f"{dev}:1: label is 'c' but must be one of 'a', 'b'"]
    unlabelled = written(tmp_path, "unlabelled.tsv", "x\n")
    assert refusal(data.encode, data.read(unlabelled), encoder, labels) == [f"{unlabelled}:1: has no label"]
    assert data.encode(data.read(unlabelled), encoder).labels.tolist() == [corpora.UNLABELLED]


# Encoding.

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh你好吗", "ab", "##cd", "##e"]


def encoder_of(config, tokenization="characters", max_tokens=None):
    return data.TextEncoder.of(tokenization, VOCABULARY, config, max_tokens)


def test_texts_and_pairs_are_put_together(small):
    def encoded(*texts, variant="bert", tokenization="characters"):
        return encoder_of(small(variant), tokenization).encode(*texts)

    one, pair = encoded("A你 好"), encoded("ab", "你z")
    assert one.tokens == ("[CLS]", "a", "你", "好", "[SEP]")
    assert one.ids.tolist() == [2, 4, 12, 13, 3]
    assert pair.tokens == ("[CLS]", "a", "b", "[SEP]", "你", "z", "[SEP]")
    assert pair.ids.tolist() == [2, 4, 5, 3, 12, 1, 3]
    assert pair.texts == (None, 0, 0, None, 1, 1, None)
    for variant, first, second in (("bert", 0, 1), ("bert-pytorch", 1, 2), ("vanilla-encoder", 0, 0)):
        segments = encoded("ab", "你z", variant=variant).segment_ids.tolist()
        assert segments == [first] * 4 + [second] * 3
    pieces = encoded("abcde 你好", tokenization="wordpiece").tokens
    assert pieces == ("[CLS]", "ab", "##cd", "##e", "你", "好", "[SEP]")
    assert encoded("ab abc h", tokenization="words").ids.tolist() == [2, 15, 1, 11, 3]


def test_truncation_keeps_both_texts(small):
    encoder = encoder_of(small("bert"), max_tokens=11)
    for a, b, kept, others in (
        ("abcdefgh", "abcdefgh", "abcd", "abcd"),
        ("ab", "abcdefgh", "ab", "abcdef"),
        ("abcdefgh", "a", "abcdefg", "a"),
        ("abc", "abc", "abc", "abc"),
    ):
        found = encoder.encode(a, b)
        assert found.tokens == ("[CLS]", *kept, "[SEP]", *others, "[SEP]")
        assert found.truncated == len(a + b) - len(kept + others)
    assert encoder.encode("abcdefgh" * 2).truncated == 7
    (line,) = refusal(encoder_of, small(), max_tokens=14)
    assert line.startswith("'max_tokens' is 14 but must be at most 13")
    (line,) = refusal(encoder_of(small(), max_tokens=3).encode, "a", "b")
    assert line.startswith("a sample may have 3 tokens but must have more than 3")


@pytest.mark.parametrize("tokenization", data.TOKENIZATIONS)
def test_no_text_can_say_padding_or_a_mark_or_be_none(small, tokenization):
    encoder = encoder_of(small(), tokenization, 13)
    found = encoder.encode("a [PAD] [CLS] [SEP]", "[PAD]")
    assert (found.ids != 0).all()
    assert [int((found.ids == special).sum()) for special in (2, 3)] == [1, 2]
    assert refusal(encoder.encode, "ab\udcffc") == [
        "'ab\\udcffc' is no text: surrogates not allowed at character 2"
    ]


def test_a_vocabulary_is_learnt_the_same_each_time(small):
    texts = [line.split("\t")[0] for line in PAIRS.splitlines()] + WORDS.splitlines()
    program = (
        "from concord import spec; from concord.training import data\nfor one in data.TOKENIZATIONS:\n"
        f"    encoder = data.TextEncoder.learn({texts!r}, spec.variant('bert'), one, size=31)\n"
        f"    print(encoder.vocab_size, encoder.files())"
    )
    one, other = (python("-c", program).stdout for _ in range(2))
    assert one == other
    assert all(4 < int(line.split()[0]) <= 31 for line in one.splitlines())
    assert refusal(data.TextEncoder.learn, [], small()) == [
        "no token comes 2 times in the texts: there is no vocabulary to learn"
    ]


# The corpus.


def test_a_configuration_that_does_not_fit_is_explained(small):
    encoder, labels = encoder_of(small("bert")), data.Labels(("a", "b", "c"))
    sizes = {"vocab_size": 7, "pad_id": 1, "max_positions": 11, "num_segments": 1, "num_classes": 2}
    found = data.unfit(small("bert", token_padding_row=1, **sizes), encoder, labels)
    assert [problem.rpartition("as ")[2] for problem in found] == [f"{name!r} says" for name in sizes]
    assert data.fitted(small("vanilla-encoder"), encoder, labels).token_padding_row == 0
    assert data.fitted(small("bert", num_classes=1), encoder, data.Labels(("a", "b"))).num_classes == 1


def test_the_example_of_the_guide_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/data.md").read_text(), re.DOTALL)
    done = python("-c", example, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    first, second, tokens = done.stdout.splitlines()
    assert sorted(re.findall(r"tsv:(\d)", first + second)) == list("1234")
    assert tokens == "('[CLS]', '质', '量', '好', '[SEP]', '不', '好', '[SEP]')"


# Batches of a corpus: what a model is given, in which order, and how wide.


def small_corpus(folder, config, count=23):
    random = Random(7)

    def text():
        return "".join(random.choices("abcdefgh你好吗", k=random.randint(1, 6)))

    lines = [f"{text()}\t{text()}\t{number % 3}" for number in range(count)]
    found = data.read(written(folder, "train.tsv", "\n".join(lines) + "\n"))
    return data.encode(found, encoder_of(config), data.Labels.of(sample.label for sample in found.samples))


def test_a_batch_is_what_the_model_takes(tmp_path, variant_config):
    config = variant_config
    made = small_corpus(tmp_path, config)
    encoder = encoder_of(config)
    config = data.fitted(config, encoder, data.Labels(("0", "1", "2")))
    assert (config.vocab_size, config.num_classes, config.pad_id) == (len(VOCABULARY), 3, 0)
    assert not data.unfit(config, encoder, data.Labels(("0", "1", "2")))
    seen = []
    for numbers, batch in data.batches(made, config, batch_size=5, seed=1):
        validate_batch(config, batch)
        width = batch.input_ids.shape[1]
        for at, number in enumerate(numbers):
            index = made.numbers.tolist().index(number)
            seen.append(index)
            places, padding = slice(*made.starts[index : index + 2]), width - made.lengths[index]
            assert batch.input_ids[at].tolist() == [*made.ids[places], *[config.pad_id] * padding]
            assert batch.labels[at] == made.labels[index] == index % 3
            if config.num_segments:
                assert batch.segment_ids[at].tolist() == [*made.segment_ids[places], *[0] * padding]
    assert sorted(seen) == list(range(23))


def test_the_order_follows_from_seed_and_epoch_alone(tmp_path, small):
    made = small_corpus(tmp_path, small("bert"))

    def numbers(**options):
        return [found.tolist() for found, _ in data.batches(made, small("bert"), 5, **options)]

    for bucketed in (False, True):
        drawn = ((3, 0), (3, 0), (3, 1), (4, 0), (2**40 + 3, 0))
        orders = [numbers(seed=seed, epoch=epoch, bucketed=bucketed) for seed, epoch in drawn]
        assert orders[0] == orders[1]
        assert len({str(one) for one in orders}) == 4
        for one in orders:
            assert [len(batch) for batch in one] == [5, 5, 5, 5, 3]
            assert sorted(number for batch in one for number in batch) == made.numbers.tolist()
    assert numbers() == [made.numbers[at : at + 5].tolist() for at in range(0, 23, 5)]
    assert order(7, 3, 0).tolist() == [5, 2, 4, 1, 3, 6, 0]


def test_widths_are_multiples_and_those_of_a_step_are_one(tmp_path, small):
    config = small("bert", max_positions=13)
    made = small_corpus(tmp_path, config, count=211)

    def widths(batch=2, **asked):
        drawn = data.batches(made, config, batch, seed=0, **asked)
        return [given.required("input_ids").shape[1] for _, given in drawn]

    alone, rounded, pairs = widths(), widths(multiple=5), widths(multiple=5, together=2)
    assert len(set(alone)) > len(set(rounded)) > 1
    assert rounded == [min(-(-width // 5) * 5, 13) for width in alone]
    assert pairs == [max(rounded[place - place % 2 : place - place % 2 + 2]) for place in range(len(rounded))]
    assert made.lengths.sum() / 7 < sum(widths(7, bucketed=True)) < 0.85 * sum(widths(7))


def test_the_width_of_batches_can_be_fixed(tmp_path, small):
    made = small_corpus(tmp_path, small("bert"))
    flat = small("tf1-text-classifier", max_positions=13)
    assert {batch.arrays()["input_ids"].shape[1] for _, batch in data.batches(made, flat, 5)} == {13}
    narrow = small("bert", num_segments=1, vocab_size=3, num_classes=2, max_positions=7)
    clauses = [line.partition("clause=")[2] for line in refusal(data.batches, made, narrow, 5)]
    assert clauses == ["INP-2]", "INP-1]", "EMB-5]", "INP-3]"]


def test_samples_without_label_have_one_that_counts(tmp_path, small):
    found = data.read(written(tmp_path, "plain.txt", "ab\ncd\n"))
    for ignored, expected in ((None, 0), (0, 1), (2, 0)):
        config = small("bert", ignore_label=ignored)
        ((_, batch),) = data.batches(data.encode(found, encoder_of(config)), config, 5)
        validate_batch(config, batch)
        assert batch.arrays()["labels"].tolist() == [expected] * 2
