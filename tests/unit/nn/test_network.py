"""The interface of networks: activation checkpointing."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.nn.network import checkpoint_activations
from regard.nn.transformer import Transformer
from regard.recipe import Recipe

SmallRecipe = Callable[..., Recipe]


def loss_and_stored_bytes(network: Transformer) -> tuple[Tensor, int]:
    """The loss of a batch, after its backward pass, and the bytes that are stored between the two passes."""
    stored = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal stored
        stored += tensor.nbytes
        return tensor

    torch.manual_seed(5)
    ids = torch.randint(10, 50, (4, 12))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = network(ids, ids).logsumexp(-1).mean()
    loss.backward()
    return loss, stored


def test_activation_checkpointing_stores_less_and_gives_the_same_gradients(
    small_recipe: SmallRecipe,
) -> None:
    layers = {"encoder_layers": 3, "decoder_layers": 3}
    config = small_recipe(model={"dropout": 0.2, **layers}).model
    torch.manual_seed(1)
    networks = [Transformer(config, 50, 50) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    checkpoint_activations(networks[1])
    (loss, stored), (other_loss, stored_less) = map(loss_and_stored_bytes, networks)
    assert torch.equal(loss, other_loss)
    assert stored_less < stored / 4
    for one, other in zip(*(network.parameters() for network in networks), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
