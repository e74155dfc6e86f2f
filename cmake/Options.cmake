# The options of the build and what each may be. What is wrong here is wrong on every machine, whatever it has.
set(ROCKET_CUDA AUTO CACHE STRING "AUTO, ON or OFF")
set(ROCKET_MPI AUTO CACHE STRING "AUTO, ON or OFF")
set(ROCKET_NCCL AUTO CACHE STRING "AUTO, ON or OFF")
set(ROCKET_CUDA_ARCHS native CACHE STRING "native, all, or a list of CUDA architectures such as 90a;121a")
option(ROCKET_TESTS "Build the component tests" ON)
option(ROCKET_PYTHON "Build the Python module" ON)
option(ROCKET_FUZZ "Build the fuzz entries" OFF)
set(ROCKET_SANITIZE "" CACHE STRING "Sanitizers, for instance address,undefined")

set(rocket_lowest_arch 90)  # kernels use clusters of thread blocks and launches that overlap, which older GPUs lack

foreach(name ROCKET_CUDA ROCKET_MPI ROCKET_NCCL)
  if(NOT "${${name}}" MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${name}: expected AUTO, ON or OFF, found '${${name}}'")
  endif()
endforeach()

foreach(name ROCKET_TESTS ROCKET_PYTHON ROCKET_FUZZ)
  string(TOUPPER "${${name}}" value)
  if(NOT value MATCHES "^(ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
    message(FATAL_ERROR "${name}: expected ON or OFF, found '${${name}}'")
  endif()
endforeach()

if(ROCKET_SANITIZE AND NOT ROCKET_SANITIZE MATCHES "^[a-z-]+(,[a-z-]+)*$")
  message(FATAL_ERROR "ROCKET_SANITIZE: expected a list for -fsanitize= such as address,undefined, found "
          "'${ROCKET_SANITIZE}'")
endif()

function(rocket_check_archs)
  if(ROCKET_CUDA_ARCHS MATCHES "^(native|all)$")
    return()
  endif()
  set(expected "ROCKET_CUDA_ARCHS: expected native, all, or a list such as 90a;121a, found '${ROCKET_CUDA_ARCHS}'.")
  if(ROCKET_CUDA_ARCHS STREQUAL "")
    message(FATAL_ERROR "${expected} For the GPUs of this machine: native.")
  endif()
  foreach(arch IN LISTS ROCKET_CUDA_ARCHS)
    if(NOT arch MATCHES "^([1-9][0-9]+)([af]?)(-real|-virtual)?$")
      message(FATAL_ERROR "${expected} An architecture is a number as in nvcc's sm_90, with a or f after it where "
              "wanted, and -real or -virtual; between two of them is a semicolon.")
    elseif(CMAKE_MATCH_1 LESS rocket_lowest_arch)
      message(FATAL_ERROR "ROCKET_CUDA_ARCHS: the lowest architecture that the CUDA backend runs on is "
              "${rocket_lowest_arch}, found '${arch}'. For older GPUs build without it: ROCKET_CUDA=OFF.")
    elseif(CMAKE_MATCH_2 STREQUAL "f" AND CMAKE_MATCH_1 LESS 100)
      message(FATAL_ERROR "${expected} Families, with f after the number, begin at 100f; '${CMAKE_MATCH_1}a' is exact.")
    endif()
  endforeach()
endfunction()
rocket_check_archs()

foreach(other CUDA MPI)
  if(ROCKET_NCCL STREQUAL "ON" AND ROCKET_${other} STREQUAL "OFF")
    message(FATAL_ERROR "ROCKET_NCCL=ON: expected a build with CUDA and MPI, which NCCL is for, "
            "found ROCKET_${other}=OFF. Leave ROCKET_NCCL at AUTO, or set ROCKET_${other}=ON.")
  endif()
endforeach()

# Folders that are searched for unless they are given. One that is given, or was found once, must have its header.
foreach(given ROCKET_NCCL_INCLUDE:nccl.h ROCKET_CUBLASLT_INCLUDE:cublasLt.h)
  string(REGEX MATCH "^(.*):(.*)$" given ${given})
  set(name ${CMAKE_MATCH_1})
  set(header ${CMAKE_MATCH_2})
  if(NOT DEFINED CACHE{${name}} OR "$CACHE{${name}}" MATCHES "-NOTFOUND$")
    continue()
  endif()
  set(${name} "" CACHE PATH "Folder of ${header}")  # it is there: this makes a relative one absolute
  if("$CACHE{${name}}" STREQUAL "")
    unset(${name} CACHE)
  elseif(NOT EXISTS "$CACHE{${name}}/${header}")
    message(FATAL_ERROR "${name}: expected the folder of ${header}, found '$CACHE{${name}}', where there is none. "
            "Without it (-U ${name}) the header is searched for.")
  endif()
endforeach()
