"""What stands in for packages that transformers' classes want and that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers.audio_utils import mel_filter_bank
from transformers.models.granite_speech import feature_extraction_granite_speech
from transformers.models.inkling import modeling_inkling


@contextmanager
def stand_ins() -> Iterator[None]:
    """For torchaudio's spectrogram, of which Granite Speech is made; and for Inkling's tower for pictures, which plans
    itself by scipy, where the row of the table takes sounds alone.
    """
    torchaudio = SimpleNamespace(transforms=SimpleNamespace(MelSpectrogram=MelSpectrogram))
    with (
        patch.object(feature_extraction_granite_speech, "requires_backends", lambda *_: None),
        patch.object(feature_extraction_granite_speech, "torchaudio", torchaudio, create=True),
        patch.object(modeling_inkling, "InklingVisionModel", lambda config: torch.nn.Identity()),
    ):
        yield


class MelSpectrogram(torch.nn.Module):
    """[B, samples] -> [B, mels, frames], by the defaults of ``torchaudio.transforms.MelSpectrogram``."""

    def __init__(self, *, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int) -> None:
        super().__init__()
        self.n_fft, self.hop_length = n_fft, hop_length
        self.register_buffer("window", torch.hann_window(win_length))
        filters = mel_filter_bank(n_fft // 2 + 1, n_mels, 0.0, sample_rate / 2, sample_rate, norm=None, mel_scale="htk")
        self.register_buffer("filters", torch.from_numpy(filters).float())

    def forward(self, waveform: torch.Tensor) -> Any:
        window: Any = self.window
        spectrum = torch.stft(
            waveform, self.n_fft, self.hop_length, len(window), window, pad_mode="reflect", return_complex=True
        )
        return (spectrum.abs().pow(2).transpose(1, 2) @ self.filters).transpose(1, 2)
