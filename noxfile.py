"""Every check of this repository, one session each; plain `nox` runs those that a change must pass.

The packages come from the working tree. Pins that only this repository's own runs need are here and nowhere else.
`LOGITLESS_TORCH` replaces torch's, e.g. `LOGITLESS_TORCH="torch==2.11.*" nox -s "tests(torch)"`; which build of it
(CPU or CUDA) comes is pip's own configuration, as anywhere.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
# Named in every `pip install` that brings a package of ours: given only their range, pip takes the newest.
TORCH = os.environ.get("LOGITLESS_TORCH", "torch==2.13.0")
# To compile all of torch takes most of an install, and the first import compiles what it needs: if it may write it.
NO_COMPILE = "--no-compile"
# And no test may reach for a model hub.
ENV = {"PYTHONDONTWRITEBYTECODE": None, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

FOLDERS = {
    "core": "packages/core",
    "torch": "packages/backend-torch",
    "triton": "packages/backend-triton",
    "hf": "packages/adapter-hf",
    "mcore": "packages/adapter-mcore",
}
# What each package is tested with, itself last: core, and for an adapter one backend.
TESTED_WITH = {
    "core": ["core"],
    "torch": ["core", "torch"],
    "triton": ["core", "triton"],
    "hf": ["core", "torch", "hf"],
    "mcore": ["core", "torch", "mcore"],
}
EXTRAS = {"hf": "[score,plot]"}
# The oldest that its adapter supports, and the newest: from 0.18 on another way leads to the hidden states.
MEGATRON = {"0.16": "megatron-core==0.16.1", "0.19": "megatron-core==0.19.2"}
# The default sessions that run core and the backends.
RECORDED = ["tests(core)", "tests(torch)", "tests(triton)", "integration", "plugins"]
LEAST_COVERED = 95  # percent of each package's lines, and of its branches
NEWEST_TRANSFORMERS = "transformers==5.*"
COMBINATIONS = nox.project.load_toml(ROOT / "tests/release/combinations.toml")


def share(venv: Path) -> None:
    """Makes the large files of `venv` one on disk with those of the other venvs, as uv does; to replace one is safe.

    Eight sessions have a torch and a Triton of their own: 17 GB, and without the copies 5.5.
    """
    store = ROOT / ".nox/shared"
    store.mkdir(exist_ok=True)
    for record in venv.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            large = [(path, digest) for path, digest, size in csv.reader(lines) if int(size or 0) >= 1 << 19 and digest]
        for path, digest in large:
            file, shared = record.parents[1] / path, store / digest
            with contextlib.suppress(OSError):  # a file system without hard links
                if not shared.exists():
                    shared.hardlink_to(file)
                elif not shared.samefile(file):
                    link = file.with_name(f"{file.name}.link")
                    link.hardlink_to(shared)
                    link.replace(file)


def install(
    session: nox.Session, names: list[str], *more: str, tests_of: str | None = None, torch: str = TORCH
) -> None:
    """Installs packages of ours editable, in one command so that they resolve against each other."""
    wanted = [NO_COMPILE, torch, *more]
    for name in names:
        wanted += ["-e", FOLDERS[name] + EXTRAS.get(name, "")]
    if tests_of:
        wanted += ["--group", f"{FOLDERS[tests_of]}/pyproject.toml:test"]
    session.install(*wanted)
    share(Path(session.virtualenv.location))


def install_megatron(session: nox.Session, release: str, torch: str = TORCH) -> None:
    """Megatron-Core as the adapter's tests need it.

    From 0.17 on it states Python 3.12, for which its wheels are built; its source runs on 3.10 all the same.
    """
    session.install(NO_COMPILE, torch, "numpy", "packaging>=24.2", "triton>=3.5")
    session.install(NO_COMPILE, "--no-deps", "--ignore-requires-python", MEGATRON[release])
    share(Path(session.virtualenv.location))


def run_tests(session: nox.Session, folder: str) -> None:
    """Runs pytest; where the session `coverage` asks for it, what the tests ran is recorded."""
    data, command = os.environ.get("LOGITLESS_COVERAGE"), ["pytest", folder, *session.posargs]
    if data is None:
        session.run(*command, env=ENV)
        return
    session.install("coverage[toml]>=7.10")
    session.run("coverage", "run", "-m", *command, env={**ENV, "COVERAGE_FILE": data})


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in FOLDERS])
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, with nothing installed that it does not need."""
    install(session, TESTED_WITH[package], tests_of=package)
    if package == "mcore":
        install_megatron(session, "0.19")
    run_tests(session, f"{FOLDERS[package]}/tests")


@nox.session
def megatron(session: nox.Session) -> None:
    """The Megatron-Core adapter's tests on the oldest supported release."""
    install(session, TESTED_WITH["mcore"], tests_of="mcore")
    install_megatron(session, "0.16")
    session.run("pytest", f"{FOLDERS['mcore']}/tests", *session.posargs, env=ENV)


@nox.session
def integration(session: nox.Session) -> None:
    """All packages together: each adapter on each backend, what holds across packages, and the blocks of the pages."""
    install(session, list(FOLDERS), "sybil>=9", tests_of="hf")
    install_megatron(session, "0.19")
    run_tests(session, "tests")


@nox.session
def isolation(session: nox.Session) -> None:
    """Each package as a user installs it: its wheel and core's in a new venv, with nothing else."""
    session.install("pytest>=9")
    venvs = Path(session.create_tmp()) / "venvs"
    for name, folder in FOLDERS.items():
        session.run("python", "-m", "venv", "--clear", str(venvs / name), silent=True)
        python = venvs / name / ("Scripts" if os.name == "nt" else "bin") / "python"
        wheels = [f"./{path}" for path in dict.fromkeys([FOLDERS["core"], folder])]
        session.run(str(python), "-m", "pip", "install", "-qq", NO_COMPILE, TORCH, *wheels, external=True)
        share(venvs / name)
    session.run("pytest", "tests/isolation", *session.posargs, env={**ENV, "LOGITLESS_VENVS": str(venvs)})
    shutil.rmtree(venvs)


@nox.session
def plugins(session: nox.Session) -> None:
    """Plugins by others, good and broken, installed beside core and the torch backend."""
    fixtures = sorted(str(path.parent) for path in (ROOT / "tests/plugins/dists").glob("*/pyproject.toml"))
    install(session, ["core", "torch"], "pytest>=9", "hypothesis>=6.100", *fixtures)
    run_tests(session, "tests/plugins")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and its format."""
    session.install("ruff==0.17.*")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over every package."""
    install(session, list(FOLDERS), "mypy==2.4.*", "pytest>=9", "hypothesis>=6.100")
    session.run("mypy", *(f"{folder}/src" for folder in FOLDERS.values()))


def built(session: nox.Session) -> list[str]:
    """Each package's sdist and the wheel built from it, both checked."""
    session.install("build", "hatchling>=1.27", "twine", "check-wheel-contents")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in FOLDERS.values():
        # An isolated build is what pip does in the isolation session; here it would cost a venv for each artefact.
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), folder, silent=True)
    files = sorted(map(str, dist.iterdir()))
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *(path for path in files if path.endswith(".whl")))
    return files


@nox.session
def build(session: nox.Session) -> None:
    """Each package's sdist and the wheel built from it, both checked."""
    built(session)


@nox.session(venv_backend="none")
def changes(session: nox.Session) -> None:
    """A package that has changed since its last release has a new version and a CHANGELOG entry."""
    session.run(sys.executable, "tests/release/changes.py", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """All wheels, and then all sdists, installed in a new venv and tried; docs/releasing.md says what comes after."""
    session.run(sys.executable, "tests/release/changes.py", external=True)
    files = built(session)
    versions = Path(session.create_tmp()).resolve() / "versions.json"
    projects = [nox.project.load_toml(f"{folder}/pyproject.toml")["project"] for folder in FOLDERS.values()]
    versions.write_text(json.dumps({project["name"]: project["version"] for project in projects}))
    venv = versions.with_name("venv")
    session.run("python", "-m", "venv", "--clear", str(venv), silent=True)
    python = str(venv / ("Scripts" if os.name == "nt" else "bin") / "python")
    # The wheels bring all that they need; the sdists then take their place.
    for kind, options in ((".whl", [TORCH]), (".tar.gz", ["--force-reinstall", "--no-deps"])):
        chosen = [path for path in files if path.endswith(kind)]
        session.run(python, "-m", "pip", "install", "-qq", NO_COMPILE, *options, *chosen, external=True)
        session.run(python, "-m", "pip", "check", external=True)
        with session.chdir(venv):
            session.run(python, "-I", str(ROOT / "tests/release/smoke.py"), str(versions), external=True)
    shutil.rmtree(venv)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Malformed records, files, settings and options, and runs killed at random; writes docs/fuzz.md."""
    install(session, ["core", "torch", "triton", "hf"], tests_of="hf")
    session.run("python", "tests/fuzz/run.py", *session.posargs, env=ENV)


@nox.session
def docs(session: nox.Session) -> None:
    """The site of docs/, in docs/_build; a warning is an error. What its pages run is run by `integration`."""
    # Not by `install`: pages look at no Parquet and draw nothing. What is imported for its docstrings must be there.
    packages = [word for folder in FOLDERS.values() for word in ("-e", folder)]
    kit = ["pytest>=9", "hypothesis>=6"]
    session.install(NO_COMPILE, TORCH, *packages, *kit, "sphinx>=8.1,<10", "myst-parser>=4", "furo")
    install_megatron(session, "0.19")
    env = {**ENV, "PYTHONWARNINGS": "ignore"}  # Megatron's, of what it would like to have; not Sphinx's
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-q", "-E", "docs", "docs/_build", env=env)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Runs again what the default sessions run of core and the backends, and holds each to 95 % of lines and branches.

    Apart from them because recording is dear: core's tests take 49 s of processor time in place of 26.
    """
    session.install("coverage[toml]>=7.10", "nox")
    data = Path(session.create_tmp()) / "coverage/data"
    shutil.rmtree(data.parent, ignore_errors=True)
    data.parent.mkdir()
    session.run("nox", "-s", *RECORDED, env={"LOGITLESS_COVERAGE": str(data)})
    env, report = {"COVERAGE_FILE": str(data)}, data.with_name("report.json")
    session.run("coverage", "combine", env=env, silent=True)
    session.run("coverage", "report", "--show-missing", "--skip-covered", env=env)
    session.run("coverage", "json", "-q", "-o", str(report), env=env)
    files, low = json.loads(report.read_text())["files"], []
    for folder in (FOLDERS[name] for name in ("core", "torch", "triton")):
        found = [file["summary"] for path, file in files.items() if Path(path).is_relative_to(folder)]
        for what, of_all in (("lines", "statements"), ("branches", "branches")):
            covered, total = (sum(one[key] for one in found) for key in (f"covered_{what}", f"num_{of_all}"))
            told = f"{folder}: {100 * covered / total:.1f} % of {total} {what}"
            session.log(told)
            low += [told] if 100 * covered < LEAST_COVERED * total else []
    if low:
        session.error(f"expected at least {LEAST_COVERED} %, got " + "; ".join(low))


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """Plants faults in core and both backends and counts those that their tests catch; writes docs/mutation.md.

    Goes on where it was broken off: what it found is kept in nox's cache, in the folder `mutation`.
    """
    install(session, ["core", "torch", "triton"], "cosmic-ray==8.7.*", "pytest-cov>=7", "numpy", tests_of="core")
    command = ["python", "tests/mutation/run.py", "--work", str(Path(session.cache_dir) / "mutation")]
    session.run(*command, *session.posargs, env={**ENV, "OMP_NUM_THREADS": "1"})


@nox.session(default=False)
@nox.parametrize(
    ["python", "combination"], [nox.param(asked["python"], name, id=name) for name, asked in COMBINATIONS.items()]
)
def compat(session: nox.Session, combination: str) -> None:
    """One package's tests on chosen versions of what it stands on; writes docs/versions.md."""
    asked = COMBINATIONS[combination]
    package, torch = asked["tests"], asked.get("torch", TORCH)
    install(session, TESTED_WITH[package], *asked.get("requires", []), tests_of=package, torch=torch)
    if "megatron" in asked:
        install_megatron(session, asked["megatron"], torch)
    junit = Path(session.create_tmp()) / "junit.xml"
    command = ["pytest", f"{FOLDERS[package]}/tests", f"--junitxml={junit}", *session.posargs]
    session.run(*command, env=ENV, success_codes=[0, 1])
    if not session.posargs:  # else it was not all of them
        session.run("python", "tests/release/versions.py", combination, str(junit))


@nox.session(default=False)
def packed(session: nox.Session) -> None:
    """Every text family of the newest transformers, packed against each sequence alone; writes docs/packed.md."""
    install(session, TESTED_WITH["hf"])
    session.run("python", "tests/packed/families.py", *session.posargs, env=ENV)


@nox.session(default=False)
def zoo(session: nox.Session) -> None:
    """Binds a tiny model of every family of the newest transformers; writes docs/heads.md."""
    # Some families' towers need the last three, if only to be built.
    install(session, TESTED_WITH["hf"], NEWEST_TRANSFORMERS, "scipy", "timm", "torchvision")
    session.run("python", "tests/zoo/run.py", *session.posargs, env={**ENV, "OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Families × {plain, checkpointing, LoRA head, offload, compile, DDP, FSDP2}; writes docs/matrix.md."""
    install(session, TESTED_WITH["hf"], tests_of="hf")
    env = {**ENV, "LOGITLESS_MATRIX": str(ROOT / "docs/matrix.md")}
    session.run("pytest", f"{FOLDERS['hf']}/tests/test_matrix.py", *session.posargs, env=env)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Scores a real file with a small real model, checks it, and trains a few steps."""
    install(session, ["core", "torch", "hf"], "gguf", "accelerate")
    session.run("python", "examples/demo.py", *session.posargs, env={"PYTHONDONTWRITEBYTECODE": None})


@nox.session(default=False)
def trl(session: nox.Session) -> None:
    """A real GRPOTrainer on the demo's model: stock, full logits and ours train alike, with and without LoRA."""
    install(session, ["core", "torch", "hf"], "gguf", "accelerate", "peft", "trl==1.16.*")
    model = "demo-output/SmolLM2-135M-Instruct"
    session.run("python", "examples/fetch_model.py", model, env={"PYTHONDONTWRITEBYTECODE": None})
    session.run("python", "benchmarks/trl_equality.py", "--model", model, *session.posargs, env=ENV)


@nox.session(default=False)
def verl(session: nox.Session) -> None:
    """verl's own engines with our plugins, against their full-logits paths: FSDP, and Megatron's call order at TP 2."""
    # Without TRL, which verl 0.9.1 takes for an older one.
    install(session, ["core", "torch", "hf", "mcore"], "verl==0.9.1", "pytest>=9")
    install_megatron(session, "0.19")
    tests = [f"{FOLDERS['hf']}/tests/test_verl.py", f"{FOLDERS['hf']}/tests/test_verl_engine.py"]
    tests.append(f"{FOLDERS['mcore']}/tests/test_verl.py")
    session.run("pytest", *tests, *session.posargs, env={**ENV, "OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def gpu2(session: nox.Session) -> None:
    """Every distributed test as it stands, over NCCL, a GPU for each rank; those of four ranks want four."""
    install(session, list(FOLDERS), tests_of="hf")
    install_megatron(session, "0.19")
    # NVML tells whether there are GPUs: a process that has asked CUDA itself cannot fork one that uses it.
    env = {**ENV, "LOGITLESS_RANKS": "nccl", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "NCCL_NVLS_ENABLE": "0"}
    for folder in FOLDERS.values():
        tests = [
            str(path) for path in sorted((ROOT / folder / "tests").glob("test_*.py")) if "run_ranks" in path.read_text()
        ]
        session.run("pytest", *tests, *session.posargs, env=env)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Runs one benchmark: `nox -s bench -- op [options of logitless bench]`, or a script in benchmarks/ by its name."""
    scripts = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"tables", "plain_megatron"})
    if not session.posargs or session.posargs[0] not in ("op", *scripts):
        session.error(f"name one of: op, {', '.join(scripts)}")
    install(session, ["core", "torch", "triton", "hf"], "trl==1.16.*", "peft")
    name, *options = session.posargs
    command = ["logitless", "bench"] if name == "op" else ["python", f"benchmarks/{name}.py"]
    session.run(*command, *options)
