"""The decoder on the embedded model in fp32: the same greedy ids as transformers' own generate."""

from __future__ import annotations

import pytest
import torch
import transformers
from cerberus_decode import Adapter, Decoder, FixedTree, Gated
from cerberus_decode.embedded import model_dir
from decoding_models import TREE, OracleHeads, fresh_greedy, run_oracle

pytestmark = pytest.mark.skipif(
    not (model_dir() / "config.json").is_file(), reason="the embedded model has not been fetched"
)
QUESTION = "Name three rivers in Europe."
NEW_TOKENS = 20


def test_greedy_equals_transformers():
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir())
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    expected = fresh_greedy(model, ids, NEW_TOKENS, eos_token_id=model.generation_config.eos_token_id)
    adapter = Adapter(model)
    assert Decoder(adapter).generate(ids, max_new_tokens=NEW_TOKENS).tokens == expected
    for policy in (FixedTree(size=8), Gated(FixedTree(choices=TREE), threshold=1.5)):
        heads = OracleHeads(list(ids) + expected, right=lambda call: call % 5, vocab_size=adapter.vocab_size)
        result, _ = run_oracle(Decoder(adapter, heads, policy), ids, max_new_tokens=NEW_TOKENS)
        assert result.tokens == expected
        assert result.metrics.accepted >= 4
