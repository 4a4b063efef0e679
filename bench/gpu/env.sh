# shellcheck shell=bash
# Sourced by the other scripts: finds CUDA, NCCL and a Python with PyTorch. Sets CUDA_PATH, LD_LIBRARY_PATH and PYTHON
# if they are unset, and changes nothing else; `gpu_environment` prints the results.

PYTHON=${PYTHON:-$(command -v python3 || true)}
if [[ -z ${CUDA_PATH:-} ]]; then
  nvcc=$(command -v nvcc || true)
  for folder in /usr/local/cuda ${nvcc:+"$(dirname "$(dirname "$(readlink -f "$nvcc")")")"} /usr/local/cuda-* /opt/cuda; do
    if [[ -e $folder/include/cuda_fp16.h ]]; then
      CUDA_PATH=$folder
      export CUDA_PATH
      break
    fi
  done
fi
# Libraries of the driver, the toolkit, and pip's nvidia packages (NCCL and nvrtc often come only with PyTorch).
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib ${CUDA_PATH:+"$CUDA_PATH/lib64"} \
  $("${PYTHON:-false}" -c 'import glob, sysconfig
for part in ("nccl/lib", "cu*/lib", "cuda_nvrtc/lib", "cuda_runtime/lib"):
    print(*glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/" + part))' 2>/dev/null || true); do
  [[ -d $folder && :${LD_LIBRARY_PATH:-}: != *:$folder:* ]] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export PYTHON LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}

# gpu_library NAME: the folder of a library by LD_LIBRARY_PATH, or the loader's cache.
gpu_library() {
  local folder
  for folder in ${LD_LIBRARY_PATH//:/ }; do
    if compgen -G "$folder/$1*" >/dev/null; then
      echo "$folder"
      return
    fi
  done
  ldconfig -p 2>/dev/null | grep -m1 -o "/.*/$1.*" || echo "not found"
}

# gpu_profiler NAME: the profiler's path (ncu, or nsys), or nothing.
gpu_profiler() {
  local name=$1 path
  if path=$(command -v "$name"); then
    echo "$path"
    return
  fi
  for path in ${CUDA_PATH:+"$CUDA_PATH/bin/$name"} /usr/local/cuda*/bin/"$name" /opt/nvidia/nsight-*/*/"$name" \
    /opt/nvidia/nsight-*/*/target-linux-x64/"$name" /opt/nvidia/nsight-*/*/host/target-linux-x64/"$name" \
    /usr/local/cuda*/nsight-*/"$name" /usr/lib/nsight-*/"$name"; do
    if [[ -x $path && ! -d $path ]]; then
      echo "$path"
      return
    fi
  done
}

gpu_environment() {
  echo "machine       $(uname -srm), $(nproc) cores, $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo), load $(cut -d' ' -f1 /proc/loadavg)"
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit --format=csv,noheader |
      sed 's/^/GPU           /'
  else
    echo "GPU           nvidia-smi not found"
  fi
  echo "CUDA_PATH     ${CUDA_PATH:-not found}"
  local library
  for library in libcuda.so libnvrtc.so libnccl.so libcublas.so; do
    printf '%-13s %s\n' "$library" "$(gpu_library "$library")"
  done
  echo "nvcc          $(nvcc --version 2>/dev/null | grep -o 'release.*' || echo 'not found')"
  echo "ncu           $(gpu_profiler ncu | grep . || echo 'not found')"
  echo "nsys          $(gpu_profiler nsys | grep . || echo 'not found')"
  "${PYTHON:-false}" -c 'import sys
print("python       ", sys.version.split()[0], sys.executable)
for name in ("torch", "transformers", "triton"):
    try:
        module = __import__(name); print(f"{name:<13}", module.__version__)
    except Exception as error:
        print(f"{name:<13} cannot be used: {error}")' 2>/dev/null || echo "python        not found"
}
