# jax_fa_find_nvcc(): where the CUDA compiler is, by the rule of build_backend/jax_fa_backend.py.
# Sets JAX_FA_NVCC (empty if there is none) and JAX_FA_NVCC_LINK_FLAGS in the caller.

set(JAX_FA_MIN_CUDA 13.0)
# The environment wins over -DJAX_FA_CUDA, and neither is remembered from an earlier configuration.
if(NOT "$ENV{JAX_FA_CUDA}" STREQUAL "")
  set(JAX_FA_CUDA "$ENV{JAX_FA_CUDA}")
elseif(NOT DEFINED JAX_FA_CUDA)
  set(JAX_FA_CUDA auto)
endif()
string(TOLOWER "${JAX_FA_CUDA}" JAX_FA_CUDA)
if(NOT JAX_FA_CUDA MATCHES "^(auto|system|wheels|off)$")
  message(FATAL_ERROR "JAX_FA_CUDA=${JAX_FA_CUDA} is not one of auto, system, wheels, off")
endif()

# The first nvcc of the system that is new enough, in the order the environment prefers them.
function(jax_fa_find_system_nvcc result)
  find_program(on_path nvcc NO_CACHE)
  set(${result} "" PARENT_SCOPE)
  foreach(candidate "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc"
                    "$ENV{CUDA_PATH}/bin/nvcc" "$ENV{CUDAToolkit_ROOT}/bin/nvcc" "${on_path}"
                    /usr/local/cuda/bin/nvcc)
    if(candidate AND EXISTS "${candidate}")
      execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE version RESULT_VARIABLE rc
                      ERROR_QUIET)
      if(rc EQUAL 0 AND version MATCHES "release ([0-9]+\\.[0-9]+)"
         AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL ${JAX_FA_MIN_CUDA})
        set(${result} "${candidate}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

# The root of the PyPI compiler wheels (they share one folder, nvidia/cu13), or empty.
function(jax_fa_find_cuda_wheels result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
"import importlib.util, os
spec = importlib.util.find_spec('nvidia')
for folder in (spec.submodule_search_locations if spec else []):
    root = os.path.join(folder, 'cu13')
    if all(os.path.isfile(os.path.join(root, *p)) for p in (('bin', 'nvcc'), ('nvvm', 'bin', 'cicc'))):
        print(root)
        break
"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(jax_fa_find_nvcc)
  set(JAX_FA_NVCC "" PARENT_SCOPE)
  set(JAX_FA_NVCC_LINK_FLAGS "" PARENT_SCOPE)
  if(JAX_FA_CUDA STREQUAL "off")
    return()
  endif()
  if(NOT JAX_FA_CUDA STREQUAL "wheels")
    jax_fa_find_system_nvcc(nvcc)
    if(nvcc)
      set(JAX_FA_NVCC "${nvcc}" PARENT_SCOPE)
      return()
    endif()
  endif()
  if(NOT JAX_FA_CUDA STREQUAL "system")
    jax_fa_find_cuda_wheels(root)
    if(root)
      set(JAX_FA_NVCC "${root}/bin/nvcc" PARENT_SCOPE)
      # The wheels have lib/ where nvcc looks for lib64/.
      set(JAX_FA_NVCC_LINK_FLAGS "-L${root}/lib" PARENT_SCOPE)
      return()
    endif()
  endif()
  if(NOT JAX_FA_CUDA STREQUAL "auto")
    message(FATAL_ERROR
      "JAX_FA_CUDA=${JAX_FA_CUDA}, but no nvcc >= ${JAX_FA_MIN_CUDA} was found. Install one, or set "
      "JAX_FA_CUDA=wheels (NVIDIA's compiler from PyPI) or JAX_FA_CUDA=off (CPU kernels only).")
  endif()
endfunction()
