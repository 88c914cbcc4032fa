"""The command: refusals before anything loads, generate, bench and info on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cerberus_decode import compare
from cerberus_decode.cli import main
from cerberus_decode.cli.prompts import BUILT_IN, Prompt, TextStream, encode, read_prompts, spread
from cerberus_decode.metrics import Metrics
from model_folders import save_tiny_answers, save_tiny_heads, save_tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}

BAD_NUMBERS = ("-1", "0", "1e9", "nan", "1.5", "")
# Option of each command, and which of the numbers above it takes.
NUMERIC_OPTIONS = {
    "generate": {
        "--max-new-tokens": {"0"},
        "--temperature": {"0", "1.5"},
        "--tree-size": {"0"},
        "--gate-threshold": {"-1", "0", "1e9", "1.5"},
        "--threads": set(),
        "--seed": {"0"},
    },
    "bench": {
        "--limit": set(),
        "--max-new-tokens": {"0"},
        "--max-prompt-tokens": set(),
        "--tree-size": {"0"},
        "--gate-threshold": {"-1", "0", "1e9", "1.5"},
        "--threads": set(),
    },
    "train": {
        "--num-answers": set(),
        "--num-heads": set(),
        "--num-blocks": set(),
        "--draft-vocab-size": {"0"},
        "--epochs": set(),
        "--max-tokens": {"0"},
        "--soft-weight": {"0"},
        "--learning-rate": set(),
        "--tokens-per-step": set(),
        "--seed": {"0"},
        "--threads": set(),
    },
}

REFUSALS = """
import contextlib, io, json, sys
from cerberus_decode.cli import main
results = []
for arguments in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    results.append([status, out.getvalue(), err.getvalue()])
heavy = [name for name in ("torch", "transformers", "numpy", "safetensors") if name in sys.modules]
print(json.dumps([results, heavy]))
"""


def run_fresh(cases: list[list[str]]) -> list[tuple[str, str]]:
    """Run command lines that must be refused in one fresh process; returns standard error of each."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS],
        input=json.dumps(cases), env=ENVIRONMENT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    results, heavy = json.loads(done.stdout)
    assert heavy == []
    for arguments, (status, out, err) in zip(cases, results, strict=True):
        assert status == 2, (arguments, status, err)
        assert out == "", arguments
        assert err.startswith("cerberus: ")
        assert err.count("\n") == 1, err
        assert err.endswith("\n")
    return [err for _, _, err in results]


def test_cli_01_numbers_are_checked_before_anything_loads():
    cases, expected = [], []
    for command, options in NUMERIC_OPTIONS.items():
        for option, accepted in options.items():
            for value in BAD_NUMBERS:
                # What is accepted runs into an unknown option instead.
                cases.append([command, option, value, *(["--no-such-option"] if value in accepted else [])])
                expected.append("--no-such-option" if value in accepted else option)
            cases.append([command, option])
            expected.append(option)
    for line, arguments, option in zip(run_fresh(cases), cases, expected, strict=True):
        if option == "--no-such-option":
            assert "No such option: --no-such-option" in line, arguments
        else:
            assert f"option {option} must be " in line, (arguments, line)
            assert " from " in line, line
            assert " to " in line, line
            assert "got " + (repr(arguments[2]) if len(arguments) > 2 else "nothing") in line


def test_cli_01_other_wrong_use(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question_id": 1}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    cases = {
        (): "Missing command",
        ("dance",): "No such command 'dance'",
        ("generate", "--nope"): "No such option: --nope",
        ("generate", "a", "b"): "unexpected extra argument",
        ("generate", "--method", "magic", "hi"): "--method must be one of ar, lookup, medusa, cerberus, cerberus_gated",
        ("generate", "--dtype", "int8", "hi"): "--dtype must be one of float32, bfloat16",
        ("generate", "--gate-threshold", "1", "hi"): "--gate-threshold must come with --method cerberus_gated",
        ("generate", "hi", "--prompt-file", "x"): "--prompt-file must not come with a prompt argument",
        ("generate", "--prompt-file", "/no/such/file"): "--prompt-file must be a readable text file",
        ("bench", "--methods", "ar,magic"): "--methods must be a comma-separated list from ar, lookup, medusa",
        ("bench", "--methods", "ar,ar"): "each at most once, got 'ar,ar'",
        ("bench", "--prompts", "/no/such/file"): "--prompts must be a readable file",
        ("bench", "--prompts", str(tmp_path / "bad.jsonl")): "--prompts must hold JSON lines",
        ("bench", "--prompts", str(tmp_path / "empty.jsonl")): "--prompts must be a file with prompts",
        ("bench", "--json", "/no/such/folder/out.json"): "--json must be a file in an existing folder",
        ("train",): "--output",
        ("train", "--output", "x", "--answers", "/no/such"): "--answers must be a file",
    }
    for line, expected in zip(run_fresh([list(case) for case in cases]), cases.values(), strict=True):
        assert expected in line


def test_help_is_light():
    code = (
        "import sys\nfrom cerberus_decode.cli import main\nfor command in ([], ['generate'], ['bench'], ['train']):\n"
    )
    code += "    assert main([*command, '--help']) == 0\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--tree-size" in done.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """Options that name a tiny model and its heads of both kinds."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    for kind in ("cerberus", "medusa"):
        save_tiny_heads(folder / "heads" / kind, kind)
    return ["--model", str(folder / "model"), "--heads", str(folder / "heads"), "--no-optimize"]


def generated(capsys, *arguments: str) -> tuple[str, str]:
    assert main(["generate", "an oak and a bee", "--max-new-tokens", "16", *arguments]) == 0
    return capsys.readouterr()


def test_cli_02_every_draft_size_gives_the_same_text(tiny, capsys):
    expected, _ = generated(capsys, *tiny, "--method", "ar")
    assert len(expected) > 4
    for method in ("medusa", "cerberus"):
        for size in range(21):
            text, summary = generated(capsys, *tiny, "--method", method, "--tree-size", str(size))
            assert text == expected, (method, size)
            assert "cerberus: 16 tokens (--max-new-tokens reached), " in summary


@pytest.mark.parametrize("threshold", ["-inf", "4.5", "inf"])
def test_gate_thresholds_give_the_same_text(tiny, capsys, threshold):
    expected, _ = generated(capsys, *tiny, "--method", "ar")
    arguments = (*tiny, "--method", "cerberus_gated", "--tree-size", "9", "--gate-threshold", threshold)
    text, summary = generated(capsys, *arguments)
    assert text == expected
    share = int(summary.split("gate open in ")[1].split("%")[0])
    assert share == {"-inf": 0, "inf": 100}.get(threshold, share)


def test_generate_reads_files_and_says_what_it_did(tiny, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("an oak and a bee")
    expected, _ = generated(capsys, *tiny, "--method", "ar")
    file = str(tmp_path / "prompt.txt")
    arguments = ["--tree-size", "3", "--show-drafts", "--max-new-tokens", "16"]
    assert main(["generate", "--prompt-file", file, *tiny, *arguments]) == 0
    text, notes = capsys.readouterr()
    assert text == expected
    assert "\x1b" not in text
    assert "is no terminal, so drafts are not coloured" in notes
    assert main(["generate", "--prompt-file", file, *tiny, "--raw", "--max-new-tokens", "16"]) == 0
    assert capsys.readouterr().out != expected
    assert main(["generate", "x", *tiny, "--max-new-tokens", "0"]) == 0
    text, summary = capsys.readouterr()
    assert text == "\n"
    assert "cerberus: 0 tokens" in summary


def test_generate_samples_by_seed(tiny, capsys):
    def sampled(seed: int) -> str:
        return generated(capsys, *tiny, "--tree-size", "5", "--temperature", "1.5", "--seed", str(seed))[0]

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_missing_things_exit_1_with_one_line(tiny, capsys, tmp_path):
    for arguments, expected in (
        (["--model", str(tmp_path / "nothing")], "no such file or folder: "),
        (["--model", str(tmp_path)], "is no model folder: it holds no config.json"),
        ([*tiny[:2]], "no cerberus heads ship for model"),
        ([*tiny, "--heads", str(tmp_path)], "holds no cerberus heads"),
        ([*tiny, "--tree-size", "1000"], "size must be at most "),
    ):
        assert main(["generate", "x", "--no-optimize", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert expected in err.splitlines()[-1]


def test_interrupt_exits_130_with_one_line(capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("cerberus_decode.cli.generate.Session", interrupt)
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "\ncerberus: interrupted\n"


def test_broken_pipe_is_quiet():
    code = "import sys; from cerberus_decode.cli import main; sys.exit(main(['bench', '--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


BENCH_FIELDS = {
    "method", "category", "tokens", "seconds", "tokens_per_second", "steps", "tokens_per_step", "accepted_per_step",
    "gate_open_share", "identical_to_ar", "draft_s", "forward_s", "verify_s", "commit_s", "other_s",
}  # fmt: skip


def test_bench_writes_a_row_per_method_and_category(tiny, capsys, tmp_path):
    out = tmp_path / "rows.json"
    arguments = ["--tree-size", "7", "--gate-threshold", "4.5", "--limit", "3", "--max-new-tokens", "9"]
    assert main(["bench", *tiny, *arguments, "--max-prompt-tokens", "60", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    table = capsys.readouterr().out
    categories = ["writing", "explanation", "summarization", "all"]
    assert [(row["category"], row["method"]) for row in rows] == [
        (category, method) for category in categories for method in compare.METHODS
    ]
    for row in rows:
        assert set(row) >= BENCH_FIELDS
        assert row["identical_to_ar"] is True
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["tokens_per_step"] == pytest.approx(row["tokens"] / row["steps"])
        parts = sum(row[part] for part in ("draft_s", "forward_s", "verify_s", "commit_s", "other_s"))
        assert parts == pytest.approx(row["seconds"])
        if row["method"] == "ar":
            assert (row["tokens_per_step"], row["accepted_per_step"], row["gate_open_share"]) == (1, 0, 0)
    assert {row["tokens"] for row in rows if row["category"] == "all"} == {27}
    assert all(name in table for name in (*compare.METHODS, "speed-up", "identical", "writing"))


def test_bench_without_plain_decoding_claims_nothing(tiny, tmp_path):
    out = tmp_path / "rows.json"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "category": "one"}\n{"prompt": "b"}\n')
    arguments = ["--methods", "cerberus", "--tree-size", "2", "--max-new-tokens", "4", "--json", str(out)]
    assert main(["bench", *tiny, *arguments, "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    rows = json.loads(out.read_text())
    assert [(row["category"], row["identical_to_ar"]) for row in rows] == [
        ("one", None), ("prompts", None), ("all", None),
    ]  # fmt: skip


def outcome(method: str, tokens: list[int], seconds: float, steps: int, accepted: int, index: int = 0):
    metrics = Metrics(tokens=len(tokens), steps=steps, accepted=accepted, total_s=seconds, forward_s=seconds)
    return compare.Outcome(index, "c", method, tokens, metrics)


def test_dec_09_rows_add_up_by_hand():
    # Accepted 0, 2 and 4 drafts over three steps: 2.0 accepted and 3.0 tokens per step, 9 tokens in all.
    outcomes = [
        outcome("ar", list(range(9)), 9.0, 9, 0),
        outcome("cerberus", list(range(9)), 4.5, 3, 6),
        outcome("ar", [1, 2, 3], 1.0, 3, 0, index=1),
        outcome("cerberus", [1, 2, 4], 0.5, 3, 0, index=1),
    ]
    differing = compare.Difference(1, "cerberus", 2, gap=0.5, noise=0.1)
    _, _, plain, drafted = compare.rows(outcomes, [differing])
    assert (plain["tokens"], plain["steps"], plain["seconds"], plain["tokens_per_second"]) == (12, 12, 10.0, 1.2)
    assert (drafted["tokens_per_step"], drafted["accepted_per_step"], drafted["tokens_per_second"]) == (2.0, 1.0, 2.4)
    assert (drafted["identical_to_ar"], drafted["differing_prompts"], drafted["unexplained_differences"]) == (
        False,
        1,
        1,
    )
    assert (plain["identical_to_ar"], plain["unexplained_differences"]) == (True, 0)
    first, row, *_ = compare.rows(outcomes[:2])
    assert (first["method"], row["tokens_per_step"], row["accepted_per_step"]) == ("ar", 3.0, 2.0)


def test_first_difference():
    assert compare.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert compare.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert compare.first_difference([1, 2], [1, 2, 3]) == 2


def test_turns_rotate():
    order = []

    def method(name: str):
        return lambda ids: (order.append(name), ([0], Metrics()))[1]

    outcomes = list(compare.take_turns({name: method(name) for name in "abc"}, [("x", [1])] * 4))
    assert "".join(order) == "abcbcacababc"
    assert [o.prompt_index for o in outcomes] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_differences_are_judged_by_the_models_own_noise(tiny):
    from cerberus_decode.decode import Decoder
    from cerberus_decode.models import load

    for dtype, largest in (("float32", 1e-3), ("bfloat16", 1.0)):
        decoder = Decoder(load(tiny[1], dtype=dtype).model)
        prompt = [9, 30, 77]
        plain = decoder.generate(prompt, max_new_tokens=12, eos_token_id=()).tokens
        gaps, noise = compare.row_count_noise(decoder.adapter, prompt, plain, 8)
        assert gaps.shape == (12,)
        assert (gaps >= 0).all()
        assert 0 <= noise < largest
        changed = [*plain[:5], (plain[5] + 1) % 260, *plain[6:]]
        outcomes = [outcome("ar", plain, 1.0, 12, 0), outcome("cerberus", changed, 1.0, 6, 6)]
        (found,) = compare.differences(decoder.adapter, outcomes, [("c", prompt)], 8)
        assert (found.position, found.gap, found.noise) == (5, float(gaps[5]), noise)
        assert found.is_explained == (float(gaps[5]) < noise)


def test_limit_goes_round_the_categories():
    prompts = [Prompt(str(index), category, "") for index, category in enumerate("aaabbc")]
    assert [p.identity for p in spread(prompts, 4)] == ["0", "1", "3", "5"]
    assert spread(prompts, 99) == prompts
    assert len({prompt.category for prompt in read_prompts(None, 6)}) == 6
    assert len(read_prompts(BUILT_IN)) == 12


def test_long_prompts_keep_the_chat_template():
    tokenizer = tiny_tokenizer()
    whole = encode(tokenizer, "x" * 100)
    cut = encode(tokenizer, "x" * 100, max_tokens=60)
    assert len(whole) > 100
    assert len(cut) == 60
    assert tokenizer.decode(cut).endswith("xxx\n[assistant] ")
    assert tokenizer.decode(cut).startswith("[user] xxx")
    assert encode(tokenizer, "abc", raw=True, max_tokens=2) == tokenizer.encode("ab")
    assert tokenizer.decode(encode(tokenizer, "hi", system="be kind")).startswith("[system] be kind\n[user] hi")


def test_text_comes_in_whole_characters():
    tokenizer = tiny_tokenizer()
    text = "naïve 🐝 text, twice as long as the window it is decoded in: é"
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    unfinished = TextStream(tokenizer)
    given = [unfinished.push([token]) for token in tokenizer.encode("a🐝")[:-1]]
    assert given == ["a", "", "", ""]
    assert unfinished.finish() == "\ufffd"


def test_info_says_what_is_missing_and_why(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "torch",
        "instruction set",
        "verify_tree",
        "native",
        "no triton on cpu: ",
        "smollm2-135m-instruct",
    ):
        assert expected in out


def test_train_makes_heads_and_continues_after_a_kill(tiny, capsys, tmp_path, monkeypatch):
    from cerberus_decode.train import trainer
    from safetensors.torch import load_file

    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY_STEPS", 4)
    answers = save_tiny_answers(tmp_path / "answers.safetensors")
    command = ["train", *tiny[:2], "--answers", str(answers), "--num-heads", "2", "--num-blocks", "1"]
    command += ["--draft-vocab-size", "0", "--tokens-per-step", "128"]
    assert main([*command, "--output", str(tmp_path / "whole")]) == 0
    notes = capsys.readouterr().err
    for expected in ("hidden states: 1 of 1", "loss ", "accuracy per head ", f"heads in {tmp_path / 'whole'}"):
        assert expected in notes

    learn, steps = trainer.Trainer.learn, []

    def killed(self, *arguments):
        if len(steps) == 6:
            raise KeyboardInterrupt
        steps.append(self.step)
        return learn(self, *arguments)

    monkeypatch.setattr(trainer.Trainer, "learn", killed)
    assert main([*command, "--output", str(tmp_path / "killed")]) == 130
    assert not (tmp_path / "killed").exists()
    monkeypatch.setattr(trainer.Trainer, "learn", lambda *a: (steps.append(a[0].step), learn(*a))[1])
    assert main([*command, "--output", str(tmp_path / "killed")]) == 0
    assert steps[:8] == [0, 1, 2, 3, 4, 5, 4, 5]  # back to the checkpoint after four steps, then on
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all((whole[name] == resumed[name]).all() for name in whole)

    arguments = ["--method", "cerberus", "--heads", str(tmp_path / "whole"), "--tree-size", "1"]
    text, _ = generated(capsys, *tiny, *arguments)
    assert text == generated(capsys, *tiny, "--method", "ar")[0]


def test_answers_without_the_right_tensors_are_refused(tiny, capsys, tmp_path):
    from safetensors.torch import save_file

    for content, expected in ((None, "is no readable safetensors file"), ({}, "got no answer_start, offsets, tokens")):
        path = tmp_path / "answers.safetensors"
        path.write_bytes(b"abc") if content is None else save_file(content, path)
        assert main(["train", *tiny[:2], "--output", str(tmp_path / "out"), "--answers", str(path)]) == 1
        assert expected in capsys.readouterr().err.splitlines()[-1]
