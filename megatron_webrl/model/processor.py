"""Text and image processing of a Qwen3-VL folder: chat template, tokens, image placeholders, patches.

Rollout, trainer and engine use the same processor class on the same folder, so tokens and patches agree everywhere.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.patchifier import Patchifier, decode_image, open_image
from megatron_webrl.util import torchvision_shim

torchvision_shim.install()  # transformers imports torchvision when the first processor is loaded

_BREAK = "\u200b"  # zero-width space: invisible, and not part of any added token
_TAGS = (  # structural tags of a prompt, escaped even if the tokenizer has no entries for them
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
)
_SHIELDS = {tag: f"<{secrets.token_hex(8)}>" for tag in ("<think>", "</think>")}
"""What stands for a tag in a chat template that would interpret it; no page can guess it."""
_ANSWER = secrets.token_hex(16)  # stands for an answer


class Processor:
    """Processor of one model folder. Stateless after loading and thread-safe."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._processor = processor
        self._image_processor = processor.image_processor
        self.merge_size = int(self._image_processor.merge_size)
        self.image_token_id = int(processor.image_token_id)
        self.eos_token_id = int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self._special = [i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special]
        self._added = sorted({*self.tokenizer.get_added_vocab(), *_TAGS}, key=len, reverse=True)
        special = {str(self.tokenizer.added_tokens_decoder[number]) for number in self._special}
        self._added_special = [token for token in self._added if token in special]

    @classmethod
    def load(cls, folder: str | Path) -> Processor:
        """Load from a Hugging Face folder. Raises ValueError if it is not a Qwen3-VL folder."""
        if not Path(folder).is_dir():
            raise ValueError(f"model folder {folder} does not exist")
        processor = transformers.AutoProcessor.from_pretrained(str(folder), local_files_only=True)
        if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token_id"):
            raise ValueError(
                f"model folder {folder} has a {type(processor).__name__}, which takes no images; give a Qwen3-VL folder"
            )
        return cls(processor)

    def encode_chat(self, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> np.ndarray:
        """Tokens of a conversation up to the start of the assistant's answer: int32 [n].

        A message has "role" and "content": a string, or a list of {"type": "text", "text": ...} and {"type": "image"}.
        Each image is one placeholder token; `expand_image_tokens` repeats it to its full length. <think> tags of an
        earlier answer stay, although templates of Thinking models leave thoughts out. `tools`: OpenAI's descriptions of
        functions, for the template.
        """
        shielded = [_replace_in_answer(message, _SHIELDS) for message in messages]
        text = self._processor.apply_chat_template(
            shielded, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        for tag, shield in _SHIELDS.items():
            text = text.replace(shield, tag)
        return self._encode(text)

    @cached_property
    def placeholder_token_ids(self) -> tuple[int, int]:
        """Tokens that stand for an image or a video."""
        return self.image_token_id, int(self.tokenizer.convert_tokens_to_ids("<|video_pad|>"))

    @cached_property
    def thought_prefix(self) -> str:
        """The end of every prompt if it opens a thought, as with Thinking models: "<think>" and a line end; else ""."""
        message = {"role": "user", "content": "."}
        text = self._processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        _, tag, rest = text.rpartition("<think>")
        return tag + rest if tag and "</think>" not in rest else ""

    def encode_turn(self, *messages: dict[str, Any]) -> np.ndarray:
        """Tokens of the messages after an answer, up to the start of the next one: int32 [n].

        They follow the end token of the answer, as in `encode_chat`. The messages' text must be escaped.
        """
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
        text = self._processor.apply_chat_template([*before, *messages], add_generation_prompt=True, tokenize=False)
        end = self.tokenizer.convert_ids_to_tokens(self.eos_token_id)
        return self._encode(text.partition(_ANSWER)[2].lstrip().removeprefix(end))

    def encode_response(self, text: str) -> np.ndarray:
        """Tokens of a response as the model should produce it, including the end token: int32 [n]."""
        return np.append(self._encode(text), np.int32(self.eos_token_id))

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of a response without special tokens."""
        ids = np.asarray(token_ids, np.int64)
        known = ids[ids < len(self.tokenizer)]  # the padding of the model's vocabulary has no text
        return str(self.tokenizer.decode(known.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def has_special_tokens(self, response: np.ndarray) -> bool:
        """Whether a response holds special tokens (chat, vision) other than the end token at its end."""
        body = response[:-1] if len(response) and response[-1] == self.eos_token_id else response
        return bool(np.isin(body, self._special).any())

    def expand_image_tokens(self, token_ids: np.ndarray, grids: np.ndarray) -> np.ndarray:
        """Repeat the i-th image placeholder once per merged patch of image i: int32 [expanded].

        `grids` is int32 [images, 3], patches (t, h, w). Raises ValueError if the counts differ.
        """
        ids = np.asarray(token_ids, np.int32)
        places = ids == self.image_token_id
        lengths = np.asarray(grids, np.int64).reshape(-1, 3).prod(axis=1) // self.merge_size**2
        if int(places.sum()) != len(lengths):
            raise ValueError(
                f"the prompt has {int(places.sum())} image placeholders and {len(lengths)} images; both must match"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = lengths
        return np.repeat(ids, repeats)

    def collapse_image_tokens(self, token_ids: np.ndarray) -> np.ndarray:
        """One placeholder for each run of image placeholders, as before `expand_image_tokens`: int32 [n]."""
        ids = np.asarray(token_ids, np.int32)
        places = ids == self.image_token_id
        return ids[~(places & np.concatenate([[False], places[:-1]]))]

    def image_token_counts(self, token_ids: np.ndarray) -> np.ndarray:
        """Lengths of the runs of image placeholders in expanded tokens, in order: int64 [runs]."""
        places = np.concatenate([[False], np.asarray(token_ids) == self.image_token_id, [False]])
        edges = np.flatnonzero(places[1:] != places[:-1])
        return edges[1::2] - edges[::2]

    def pixels(self, images: Sequence[bytes]) -> tuple[torch.Tensor, np.ndarray]:
        """Decode PNG, JPEG or WebP and cut into patches: float32 [patches, dim] and int32 grids [images, 3].

        Raises ValueError for bytes that are not an image.
        """
        if not images:
            size = self._image_processor
            return torch.zeros(0, 3 * size.temporal_patch_size * size.patch_size**2), np.zeros((0, 3), np.int32)
        features = self._image_processor(images=[decode_image(data) for data in images], return_tensors="pt")
        return features["pixel_values"].to(torch.float32), features["image_grid_thw"].numpy().astype(np.int32)

    def grids(self, images: Sequence[bytes]) -> np.ndarray:
        """Grids as `pixels` returns them, from the image headers only: int32 [images, 3]."""
        return np.array([self._grid(data) for data in images], np.int32).reshape(-1, 3)

    @property
    def patchifier(self) -> Patchifier:
        """Patch geometry of `pixels`. Raises ValueError if the image processor computes other pixels."""
        patchifier = Patchifier(int(self._image_processor.patch_size), self.merge_size)
        side = 2 * patchifier.patch_size * patchifier.merge_size
        for height, width in ((side, side), (side - 3, side + 5)):  # unresized and resized
            data = _noise(height, width)
            wanted, grids = self.pixels([data])
            grid = tuple(grids[0].tolist())
            patches = np.empty(patchifier.image_bytes(grid), np.uint8)
            patchifier.patchify(data, grid, patches)
            if not torch.equal(self.normalize_patches(torch.from_numpy(patches)), wanted):
                raise ValueError(
                    f"{type(self._image_processor).__name__} of the model folder computes other pixels than the image "
                    "workers; set trainer.image_workers=0"
                )
        return patchifier

    def normalize_patches(self, patches: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise patches of `patchify` as `pixels` does: float32 [patches, dim], same device; `out`: buffer."""
        settings = self._image_processor
        frames, inside = int(settings.temporal_patch_size), int(settings.patch_size) ** 2
        factor = 1.0 / settings.rescale_factor
        mean, std = (
            copy_to_device(torch.tensor(values)[:, None] * factor, patches.device)
            for values in (settings.image_mean, settings.image_std)
        )
        values = patches.view(-1, len(mean), inside).to(torch.float32).sub_(mean).div_(std)
        if out is None:
            out = values.new_empty(len(values), len(mean) * frames * inside)
        out.view(-1, len(mean), frames, inside).copy_(values[:, :, None])  # a still image fills all frames
        return out

    def escape_special_tokens(self, text: str, keep_tags: bool = False) -> str:
        """Escape page text so that no part of it becomes a special token.

        Inserts a zero-width space after the first character of every entry of the tokenizer's added vocabulary
        (<|image_pad|>, <tool_call>, ...) and of every structural tag. Other text is unchanged. `keep_tags`: of an
        author's instructions, in which tags such as <tool_call> may be meant; images and ends of turns are escaped.
        """
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        if normalizer is not None:  # normalising later could create an entry
            text = normalizer.normalize_str(text)
        for token in self._added_special if keep_tags else self._added:
            text = text.replace(token, (token[0] + _BREAK + token[1:]) if len(token) > 1 else _BREAK)
        return text

    def _encode(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return np.asarray(ids, np.int32)

    def _grid(self, data: bytes) -> tuple[int, int, int]:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        width, height = open_image(data).size
        patch, limits = self._image_processor.patch_size, self._image_processor.size
        rows, columns = smart_resize(
            height, width, patch * self.merge_size, min_pixels=limits.shortest_edge, max_pixels=limits.longest_edge
        )
        return 1, rows // patch, columns // patch


def _replace_in_answer(message: dict[str, Any], replacements: Mapping[str, str]) -> dict[str, Any]:
    """The message; if it is an answer, with these parts replaced."""
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    for part, replacement in replacements.items():
        content = content.replace(part, replacement)
    return message | {"content": content}


def _noise(height: int, width: int) -> bytes:
    """A PNG image of random pixels."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
