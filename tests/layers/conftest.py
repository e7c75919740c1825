import pytest

from ligerzoo.layers import Linear


@pytest.fixture(autouse=True)
def unit_scale_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives linear layers the scale of `torch.nn.Linear`: with std 0.02, absolute tolerances would hide errors."""
    monkeypatch.setattr(Linear, "reset_parameters", lambda self: self.init_weights((3 * self.in_features) ** -0.5))
