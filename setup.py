"""Package metadata of faser-sglang."""

from pathlib import Path

from setuptools import find_packages, setup

SGLANG = "sglang==0.5.23"

setup(
    name="faser-sglang",
    version="0.1.0",
    description="Speculative decoding for SGLang with a draft depth for every request",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["faser_sglang", "faser_sglang.*"]),
    install_requires=[SGLANG, "numpy"],
    extras_require={
        "test": ["pytest>=8", "hypothesis>=6", "scipy", "openai", "ruff"],
        "bench": ["matplotlib"],
        "demo": ["gguf", "filelock", "safetensors"],
    },
    entry_points={
        "sglang.srt.plugins": ["faser = faser_sglang.plugin:register"],
        "sglang.srt.platforms": ["faser_cpu = faser_sglang.cpu:activate"],
    },
)
