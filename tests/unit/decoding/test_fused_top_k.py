"""The GPU kernel against log-softmax in float64, and a search that uses it against one that does not."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("Triton kernels need a GPU", allow_module_level=True)

from regard.decoding.beam_search import beam_search
from regard.decoding.fused_top_k import VOCABULARY_PART, top_tokens


@pytest.mark.parametrize("V", [97, 8_000, 2 * VOCABULARY_PART + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_tokens_are_those_of_log_softmax(V: int, dtype: torch.dtype) -> None:
    """The smaller one of equal tokens comes first, suppressed tokens never, and a row with NaN has only NaN."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(50, V, device="cuda")).to(dtype)
    suppressed = torch.tensor([0, 3, int(logits[0].argmax())], device="cuda")
    logits[7, 5] = torch.nan
    found, tokens = top_tokens(logits, 10, suppressed)
    expected = logits.double().log_softmax(-1).index_fill(1, suppressed, -torch.inf)
    expected, order = expected.sort(dim=1, descending=True, stable=True)
    rows = [row for row in range(50) if row != 7]
    torch.testing.assert_close(found.double()[rows], expected[rows, :10], atol=2e-6, rtol=0)
    assert torch.equal(tokens[rows], order[rows, :10])
    assert found[7].isnan().all()
    assert bool((tokens < V).all())


class NoState:
    """The state of a model that looks only at the last token."""

    def select(self, rows: Tensor) -> "NoState":
        return self


@pytest.mark.parametrize("length_penalty", [0.0, 0.6])
def test_a_search_on_the_gpu_finds_what_it_finds_on_the_cpu(length_penalty: float) -> None:
    torch.manual_seed(0)
    table = (2 * torch.randn(300, 300)).bfloat16().float()
    found = []
    for device in ("cpu", "cuda"):
        logits = table.to(device)

        def step(tokens: Tensor, state: NoState, logits: Tensor = logits) -> tuple[Tensor, NoState]:
            return logits[tokens], state

        found.append(
            beam_search(
                step,
                NoState(),
                max_lengths=[12, 3, 20, 7],
                bos=1,
                eos=2,
                beam=5,
                length_penalty=length_penalty,
                nbest=3,
                prefixes=[[], [7, 8], [], [9]],
                suppressed=[0, 1, 3],
                device=device,
            )
        )
    cpu, gpu = ([[one.tokens for one in sentence] for sentence in each] for each in found)
    assert gpu == cpu
