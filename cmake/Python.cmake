# Builds the Python module rocket._core.
#
# In a wheel build (scikit-build-core) it goes into the package. In a plain build the build tree gets a whole package,
# <build>/python/rocket, and a launcher of the same command line, <build>/rocket-decode. <build> is the outermost build
# folder, whether this project or an engine's was configured.
set(ROCKET_SHIPPED_FUELS sparkler)

find_package(Python 3.10 COMPONENTS Interpreter Development.Module)

set(pybind11_wanted "The Python module needs Python 3.10 or later with its headers, and pybind11")
if(Python_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_hint
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(pybind11 CONFIG QUIET HINTS ${pybind11_hint})
  set(pybind11_wanted "${pybind11_wanted} (${Python_EXECUTABLE} -m pip install pybind11)")
endif()

file(GLOB bind_sources CONFIGURE_DEPENDS ${ROCKET_ROOT}/src/bind/*.cpp)
if(NOT Python_FOUND OR NOT pybind11_FOUND)
  if(SKBUILD)
    message(FATAL_ERROR "${pybind11_wanted}.")
  endif()
  message(WARNING "${pybind11_wanted}; going on without it: no rocket-decode. ROCKET_PYTHON=OFF silences this.")
  set(ROCKET_PYTHON_BUILT OFF)
else()
  set(ROCKET_PYTHON_BUILT ON)
  pybind11_add_module(_core NO_EXTRAS ${bind_sources})  # no link-time optimisation: the module is a thin layer
  target_link_libraries(_core PRIVATE rocket_engines)
  target_compile_definitions(_core PRIVATE ROCKET_VERSION="${rocket_VERSION}")
endif()

if(SKBUILD)
  install(TARGETS _core LIBRARY DESTINATION rocket)
  if(TARGET rocket_mpi)
    install(TARGETS rocket_mpi LIBRARY DESTINATION rocket)
    add_dependencies(_core rocket_mpi)  # the wheel builds _core only
  endif()
  # Of fuels only the manifests, and the whole of those that ship: other weights may lie in the source tree.
  file(GLOB manifests RELATIVE ${ROCKET_ROOT} ${ROCKET_ROOT}/fuels/*/fuel.yaml)
  foreach(manifest ${manifests})
    get_filename_component(folder ${manifest} DIRECTORY)
    install(FILES ${ROCKET_ROOT}/${manifest} DESTINATION rocket/${folder})
  endforeach()
  foreach(fuel ${ROCKET_SHIPPED_FUELS})
    install(DIRECTORY ${ROCKET_ROOT}/fuels/${fuel} DESTINATION rocket/fuels)
  endforeach()
  return()
endif()

set(package_dir ${CMAKE_BINARY_DIR}/python/rocket)
file(MAKE_DIRECTORY ${package_dir})
if(ROCKET_PYTHON_BUILT)
  set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package_dir})
endif()
if(TARGET rocket_mpi)
  set_target_properties(rocket_mpi PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package_dir})
  if(ROCKET_PYTHON_BUILT)
    add_dependencies(_core rocket_mpi)  # which it loads from beside itself
  endif()
endif()
# Links, so that an edit of the sources is seen without a build.
file(GLOB package_files CONFIGURE_DEPENDS RELATIVE ${ROCKET_ROOT}/python/rocket ${ROCKET_ROOT}/python/rocket/*)
list(FILTER package_files EXCLUDE REGEX "__pycache__|\\.so$")
foreach(file ${package_files})
  file(CREATE_LINK ${ROCKET_ROOT}/python/rocket/${file} ${package_dir}/${file} SYMBOLIC)
endforeach()
configure_file(${ROCKET_ROOT}/cmake/rocket-decode.in ${CMAKE_BINARY_DIR}/rocket-decode @ONLY)
file(CHMOD ${CMAKE_BINARY_DIR}/rocket-decode PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE
     GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
