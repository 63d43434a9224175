"""Batches of a corpus: what a model is given, in which order, and how wide."""

from random import Random

from concord.spec.batch import validate_batch
from concord.training import data
from concord.training.data.batching import order
from tests.test_data import VOCABULARY, encoder_of, refusal, written


def small_corpus(folder, config, count=23):
    random = Random(7)
    lines = [
        f"{''.join(random.choices('abcdefgh你好吗', k=random.randint(1, 6)))}\t"
        f"{''.join(random.choices('abcdefgh', k=random.randint(1, 6)))}\t{number % 3}"
        for number in range(count)
    ]
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
        for number, row, label, at in zip(
            numbers, batch.input_ids, batch.labels, range(len(numbers)), strict=True
        ):
            index = made.numbers.tolist().index(number)
            seen.append(index)
            length = made.lengths[index]
            places = slice(*made.starts[index : index + 2])
            assert row[:length].tolist() == made.ids[places].tolist()
            assert (row[length:] == config.pad_id).all()
            assert label == made.labels[index] == index % 3
            if config.num_segments:
                assert batch.segment_ids[at, :length].tolist() == made.segment_ids[places].tolist()
                assert (batch.segment_ids[at, length:] == 0).all()
    assert sorted(seen) == list(range(23))


def test_the_order_follows_from_seed_and_epoch_alone(tmp_path, small):
    made = small_corpus(tmp_path, small("bert"))

    def numbers(**options):
        return [found.tolist() for found, _ in data.batches(made, small("bert"), 5, **options)]

    for bucketed in (False, True):
        orders = [
            numbers(seed=seed, epoch=epoch, bucketed=bucketed)
            for seed, epoch in ((3, 0), (3, 0), (3, 1), (4, 0), (2**40 + 3, 0))
        ]
        assert orders[0] == orders[1]
        assert len({str(one) for one in orders}) == 4
        assert all([len(batch) for batch in one] == [5, 5, 5, 5, 3] for one in orders)
        assert all(
            sorted(number for batch in one for number in batch) == made.numbers.tolist() for one in orders
        )
    assert numbers() == [made.numbers[at : at + 5].tolist() for at in range(0, 23, 5)]
    assert order(7, 3, 0).tolist() == [5, 2, 4, 1, 3, 6, 0]


def test_widths_are_multiples_and_those_of_a_step_are_one(tmp_path, small):
    config = small("bert", max_positions=13)
    made = small_corpus(tmp_path, config, count=211)

    def widths(**asked):
        return [
            batch.required("input_ids").shape[1]
            for _, batch in data.batches(made, config, 2, seed=0, **asked)
        ]

    alone, rounded, pairs = widths(), widths(multiple=5), widths(multiple=5, together=2)
    assert len(set(alone)) > len(set(rounded)) > 1
    assert rounded == [min(-(-width // 5) * 5, 13) for width in alone]
    assert pairs == [max(rounded[place - place % 2 : place - place % 2 + 2]) for place in range(len(rounded))]
    assert refusal(data.batches, made, config, 2, multiple=0, together=0) == [
        "'multiple' is 0 but must be at least 1",
        "'together' is 0 but must be at least 1",
    ]


def test_the_width_of_batches_can_be_fixed(tmp_path, small):
    made = small_corpus(tmp_path, small("bert"))
    flat = small("tf1-text-classifier", max_positions=13)
    assert {batch.arrays()["input_ids"].shape[1] for _, batch in data.batches(made, flat, 5)} == {13}
    longest = int(made.lengths.max())
    assert refusal(
        data.batches, made, small("bert", num_segments=1, vocab_size=3, num_classes=2, max_positions=7), 0
    ) == [
        f"a sample has {longest} tokens but must have at most 7 [clause=INP-2]",
        "a token has id 14 but must be below 3, which is 'vocab_size' [clause=INP-1]",
        "a segment is 1 but must be below 1, which is 'num_segments' [clause=EMB-5]",
        "a label is 2 but must be below 2 [clause=INP-3]",
        "'batch_size' is 0 but must be at least 1",
    ]


def test_buckets_have_less_padding_and_the_same_samples(tmp_path, small):
    made = small_corpus(tmp_path, small("bert"), count=211)

    def size(bucketed):
        return sum(
            batch.arrays()["input_ids"].size
            for _, batch in data.batches(made, small("bert"), 7, seed=0, bucketed=bucketed)
        )

    assert made.lengths.sum() <= size(True) < 0.85 * size(False)


def test_samples_without_label_have_one_that_counts(tmp_path, small):
    found = data.read(written(tmp_path, "plain.txt", "ab\ncd\n"))
    for ignored, expected in ((None, 0), (0, 1), (2, 0)):
        config = small("bert", ignore_label=ignored)
        ((_, batch),) = data.batches(data.encode(found, encoder_of(config)), config, 5)
        validate_batch(config, batch)
        assert batch.arrays()["labels"].tolist() == [expected] * 2
