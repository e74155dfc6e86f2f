"""What the build says to options that make no sense, and when it has the CUDA backend. Nothing is built.

Which GPUs there are and what nvcc is, is said by programs made here, so that these tests need neither.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = "ROCKET_CUDA_ARCHS: expected native, all, or a list such as 90a;121a, found"
LOWEST = "ROCKET_CUDA_ARCHS: the lowest architecture that the CUDA backend runs on is 90, found"

SCRIPT = f"""
cmake_minimum_required(VERSION 3.22)
include({ROOT}/cmake/Options.cmake)
include({ROOT}/cmake/CudaChoice.cmake)
message("WITH ${{ROCKET_WITH_CUDA}} ARCHS ${{rocket_cuda_archs}} SAID ${{rocket_cuda_said}}")
"""


def cmake(*arguments: str, **options: object) -> tuple[int, str]:
    """The status, and all that was said, in one line."""
    program = shutil.which("cmake")
    assert program, "cmake is missing: pip install '.[test]'"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, **options)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["ROCKET_CUDA=on"], "ROCKET_CUDA: expected AUTO, ON or OFF, found 'on'"),
        (["ROCKET_MPI=1"], "ROCKET_MPI: expected AUTO, ON or OFF, found '1'"),
        (["ROCKET_NCCL=maybe"], "ROCKET_NCCL: expected AUTO, ON or OFF, found 'maybe'"),
        (["ROCKET_NCCL=ON", "ROCKET_CUDA=OFF"], "which NCCL is for, found ROCKET_CUDA=OFF"),
        (["ROCKET_NCCL=ON", "ROCKET_MPI=OFF"], "which NCCL is for, found ROCKET_MPI=OFF"),
        (["ROCKET_NCCL_INCLUDE=/nope"], "ROCKET_NCCL_INCLUDE: expected the folder of nccl.h, found '/nope'"),
        (["ROCKET_CUBLASLT_INCLUDE=/nope"], "expected the folder of cublasLt.h, found '/nope'"),
        (["ROCKET_TESTS=maybe"], "ROCKET_TESTS: expected ON or OFF, found 'maybe'"),
        (["ROCKET_PYTHON="], "ROCKET_PYTHON: expected ON or OFF, found ''"),
        (["ROCKET_FUZZ=2"], "ROCKET_FUZZ: expected ON or OFF, found '2'"),
        (["ROCKET_SANITIZE=address;undefined"], "such as address,undefined, found 'address;undefined'"),
        (["ROCKET_CUDA_ARCHS="], f"{LIST} ''"),
        (["ROCKET_CUDA_ARCHS=foo"], f"{LIST} 'foo'"),
        (["ROCKET_CUDA_ARCHS=ALL"], f"{LIST} 'ALL'"),
        (["ROCKET_CUDA_ARCHS=sm_90"], f"{LIST} 'sm_90'"),
        (["ROCKET_CUDA_ARCHS=90a,121a"], f"{LIST} '90a,121a'"),
        (["ROCKET_CUDA_ARCHS=90a;"], f"{LIST} '90a;'"),
        (["ROCKET_CUDA_ARCHS=90f"], f"{LIST} '90f'"),
        (["ROCKET_CUDA_ARCHS=90a-fake"], f"{LIST} '90a-fake'"),
        (["ROCKET_CUDA_ARCHS=89"], f"{LOWEST} '89'"),
        (["ROCKET_CUDA_ARCHS=90a;75-virtual"], f"{LOWEST} '75-virtual'"),
    ],
)
def test_an_option_that_makes_no_sense_ends_the_configure(
    tmp_path: Path, options: list[str], said: str
) -> None:
    status, text = cmake("-S", str(ROOT), "-B", str(tmp_path), *(f"-D{option}" for option in options))
    assert status == 1
    assert said in text


@dataclass
class Machine:
    """A machine with such an nvcc, GPUs of these compute capabilities and these files."""

    folder: Path
    version: str = "13.0"
    gpus: str = "9.0"
    smi: bool = True
    files: tuple[str, ...] = ("dev/nvidiactl",)

    def program(self, name: str, text: str) -> Path:
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return file

    def choose(self, *options: str) -> tuple[int, str]:
        known = "\n".join(f"compute_{number}" for number in (75, 89, 90, 100, 103, 120, 121))
        answer = f"printf '{self.gpus}'" if self.gpus else "exit 1"
        self.program("nvidia-smi", answer if self.smi else "exit 1")
        nvcc = self.program(
            "nvcc",
            f"""case $1 in
  --version) echo 'Cuda compilation tools, release {self.version}, V{self.version}.88' ;;
  --list-gpu-arch) echo '{known}' ;;
  -o) printf '#!/bin/sh\\n%s\\n' "{answer}" > "$2" && chmod +x "$2" ;;
esac""",
        ).with_name("nvcc" if self.version else "missing")
        for name in self.files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        (self.folder / "choose.cmake").write_text(SCRIPT)
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        defined = [f"-D{option}" for option in (*options, f"rocket_system_root={self.folder}")]
        environment = {**os.environ, "PATH": path, "CUDACXX": str(nvcc)}
        return cmake(*defined, "-P", "choose.cmake", cwd=self.folder, env=environment)


@pytest.mark.parametrize(
    ("machine", "archs"),
    [
        ({}, "90-real"),
        ({"gpus": "12.1\\n12.1\\n"}, "121-real"),
        ({"gpus": "12.0\\n9.0\\n"}, "90-real;120-real"),
        ({"gpus": "10.3", "smi": False}, "103-real"),
        ({"files": ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), "gpus": "12.0"}, "120-real"),
        ({"version": "14.2"}, "90-real"),
    ],
)
def test_gpus_of_this_machine_are_built_for(tmp_path: Path, machine: dict[str, object], archs: str) -> None:
    status, text = Machine(tmp_path, **machine).choose()
    assert status == 0
    assert f"WITH ON ARCHS {archs} SAID" in text


@pytest.mark.parametrize("archs", ["90", "90a;121a", "100f;120a-real;90-virtual", "103f-real"])
def test_architectures_are_taken_as_they_are_named(tmp_path: Path, archs: str) -> None:
    machine = Machine(tmp_path, gpus="", files=())
    status, text = machine.choose("ROCKET_CUDA=ON", f"ROCKET_CUDA_ARCHS={archs}")
    assert status == 0
    assert f"WITH ON ARCHS {archs} SAID" in text


def test_of_several_gpus_those_that_are_too_old_are_named_and_left_out(tmp_path: Path) -> None:
    status, text = Machine(tmp_path, gpus="8.9\\n12.0\\n13.7\\n").choose()
    assert status == 0
    assert "not for sm_89 (older than sm_90, the lowest), sm_137 (unknown to nvcc 13.0)" in text
    assert "WITH ON ARCHS 120-real SAID" in text


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"version": ""}, "no CUDA compiler was found (looked for "),
        ({"version": "12.4"}, "expected CUDA 13 or newer, found 12.4 ("),
        ({"version": "unknown"}, "expected nvcc, found "),
        (
            {"gpus": "8.6\\n7.5\\n"},
            "this machine's GPUs cannot be built for: sm_75 (older than sm_90, the lowest), sm_86 (",
        ),
        ({"gpus": "13.7"}, "this machine's GPUs cannot be built for: sm_137 (unknown to nvcc 13.0)"),
        ({"gpus": ""}, "ROCKET_CUDA_ARCHS=native, and no NVIDIA GPU is visible here."),
    ],
)
def test_what_the_backend_lacks_is_said(tmp_path: Path, machine: dict[str, object], said: str) -> None:
    """ON ends there; AUTO goes on without."""
    status, text = Machine(tmp_path, **machine).choose("ROCKET_CUDA=ON")
    assert status == 1
    assert f"ROCKET_CUDA=ON: {said}" in text
    status, text = Machine(tmp_path, **machine).choose("ROCKET_CUDA=AUTO")
    assert status == 0
    assert text.startswith("WITH OFF ARCHS SAID")
    assert said in text


@pytest.mark.parametrize("files", [(), ("dev/dxg",), ("usr/lib/wsl/lib/libcuda.so.1",)])
def test_auto_wants_a_device_of_nvidia(tmp_path: Path, files: tuple[str, ...]) -> None:
    status, text = Machine(tmp_path, files=files).choose()
    assert status == 0
    assert text.startswith("WITH OFF ARCHS SAID no NVIDIA device: ")


def test_an_architecture_that_nvcc_does_not_know_is_named(tmp_path: Path) -> None:
    status, text = Machine(tmp_path).choose("ROCKET_CUDA_ARCHS=90a;99")
    assert status == 1
    assert f"{LIST} '99', which nvcc 13.0 (" in text
    assert "it knows 90, 100, 103, 120, 121." in text
