from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from data.captions import CaptionLimits, Fault, cleaned, faults, guess_language, num_tokens, other_language, skeleton

ZOO = Path(__file__).parents[2] / "models/zoo/tiny-h3/tokenizer"


def found(caption: str | None, **limits: object) -> dict[str, str]:
    return {item.fault: item.measured for item in faults(caption, CaptionLimits.model_validate(limits))}


@pytest.mark.parametrize(
    ("caption", "fault"),
    [
        (None, "empty"),
        ("", "empty"),
        (" \n", "empty"),
        ("...!?", "empty"),
        ("I'm sorry, but I can't help with that.", "refusal"),
        ("As an AI language model, I cannot see videos", "refusal"),
        ("Unfortunately I am unable to view the clip", "refusal"),
        ("There was no video provided.", "refusal"),
        ("IMG_2041", "file_name"),
        ("VID-20210304-0001", "file_name"),
        ("final_cut_v2.mp4", "file_name"),
        ("see https://example.org/x", "file_name"),
        ("<script>alert(1)</script> a cat", "markup"),
        ("a cat &amp; a dog", "markup"),
        ("=HYPERLINK(1)", "formula"),
        ("@SUM(A1)", "formula"),
        ("+cmd|' /C calc'!A0", "formula"),
        ("a cat\x00 purrs", "control"),
        ("a \u202ecat\u202c purrs", "control"),
        ("a caf\ufffd on a hill", "control"),
        ("word " * 500, "over_long"),
        ("鸟在树上唱歌" * 100, "over_long"),
    ],
)
def test_each_fault_is_found_with_what_was_measured(caption: str | None, fault: Fault):
    measured = found(caption)
    assert list(measured) == [fault]
    assert measured[fault]


@pytest.mark.parametrize(
    "caption",
    [
        "A red ball bounces on a wooden floor.",
        "She says she is sorry and closes the door.",
        "A sign reads 'no video'; people walk past.",
        "x < y is written on the board, 3 > 2 below",
        "Two dogs, 5 m apart; - one barks",
        "-5 degrees: a frozen lake",
        "Ein Hund läuft über die Wiese.",
        "猫が窓辺で眠っている。",
        "кошка спит",
        "Naïve café, 20 °C",
    ],
)
def test_plain_captions_in_any_script_have_no_fault(caption: str):
    assert found(caption) == {}


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("A man walks along the beach with his dog.", "en"),
        ("Ein Mann läuft mit dem Hund und ist nicht allein.", "de"),
        ("Un homme marche sur la plage avec le chien et une femme.", "fr"),
        ("El hombre camina por la playa con su perro.", "es"),
        ("L'uomo cammina sulla spiaggia con il cane e la donna.", "it"),
        ("O homem caminha na praia com o cachorro em uma tarde.", "pt"),
        ("De man loopt met het kind door een park.", "nl"),
        ("猫が窓辺で眠っている", "ja"),
        ("一只猫在窗边睡觉", "zh"),
        ("고양이가 자고 있다", "ko"),
        ("кошка спит на окне", "ru"),
        ("кішка спить на вікні", "uk"),
        ("قطة نائمة", "ar"),
        ("a cat", None),
        ("Paris", None),
        ("1234", None),
    ],
)
def test_languages_are_guessed_and_too_short_texts_are_not(text: str, language: str | None):
    assert guess_language(text) == language


def test_a_wrong_language_is_named_and_a_possible_one_is_not():
    assert other_language("кошка спит на окне", "en") == "ru"
    assert other_language("Ein Mann läuft mit dem Hund.", "en") == "de"
    assert other_language("a cat", "de") is None
    assert other_language("кошка спит", "bg") is None
    assert other_language("1234", "en") is None
    assert found("Ein Mann läuft mit dem Hund.", caption_language="en") == {"language": "de"}


def test_tokens_are_counted_by_a_tokenizer_where_one_is_given(tmp_path: Path):
    letters = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    letters.save(str(tmp_path / "tokenizer.json"))
    assert num_tokens("a cat", tmp_path) == 5  # one a character
    assert num_tokens("a cat") == 3  # two words at four tokens for three
    assert found("a cat", caption_tokenizer=tmp_path, max_caption_tokens=4) == {"over_long": "5 tokens"}
    assert found("a cat", caption_tokenizer=tmp_path, max_caption_tokens=5) == {}
    assert num_tokens("A red ball bounces.", ZOO) > 4


def test_a_folder_without_a_tokenizer_is_a_wrong_setting(tmp_path: Path):
    with pytest.raises(ValueError, match=r"caption_tokenizer = .* holds no tokenizer.json"):
        num_tokens("a cat", tmp_path)


def test_captions_of_one_template_share_a_skeleton_and_others_do_not():
    one = skeleton("The video shows a red ball in the garden, take 3")
    assert one == skeleton("The picture depicts a sleeping grey cat in the kitchen, take 17")
    assert one != skeleton("A red ball bounces past the fence and into the pond.")
    assert skeleton("a cat") == skeleton("Paris at night") == ""


def test_a_template_counts_only_as_a_habit():
    limits = CaptionLimits(max_template_share=0.2, min_template_captions=20)
    assert [item.fault for item in faults("a cat in the sun", limits, (30, 100))] == ["template"]
    assert faults("a cat in the sun", limits, (19, 20)) == []
    assert faults("a cat in the sun", limits, (20, 100)) == []


@given(st.text(max_size=200))
def test_any_text_is_judged_and_cleaning_ends_all_that_steers(text: str):
    limits = CaptionLimits(caption_language="en")
    faults(text, limits)
    guess_language(text)
    skeleton(text)
    again = [item.fault for item in faults(cleaned(text), limits)]
    assert "control" not in again
    assert "\n" not in cleaned(text)
