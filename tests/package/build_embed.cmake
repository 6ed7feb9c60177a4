# Configures, builds and runs examples/embed in WORK. WAY is `installed` or `add_subdirectory`.

cmake_minimum_required(VERSION 3.25)

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}):\n${text}")
  endif()
endfunction()

set(configure ${CMAKE_COMMAND} -S ${ROOT}/examples/embed -B ${WORK}/build -G ${GENERATOR}
  -DCMAKE_CXX_COMPILER=${COMPILER})

if(WAY STREQUAL "installed")
  file(REMOVE_RECURSE ${WORK})
  run("install" ${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/prefix)
  file(GLOB_RECURSE headers ${WORK}/prefix/include/*.h)
  if(NOT headers)
    message(FATAL_ERROR "no header was installed")
  endif()
  foreach(header IN LISTS headers)
    file(STRINGS ${header} lines REGEX "^[ \t]*#.*MXOPT_WITH_")
    if(lines)
      message(FATAL_ERROR "${header} depends on an option of the build: ${lines}")
    endif()
    file(STRINGS ${header} includes REGEX "^#include \"mxopt/")
    foreach(include IN LISTS includes)
      string(REGEX REPLACE "^#include \"(.*)\".*$" "\\1" include "${include}")
      if(NOT EXISTS ${WORK}/prefix/include/${include})
        message(FATAL_ERROR "${header} includes ${include}, which is not installed")
      endif()
    endforeach()
  endforeach()
  run("configure" ${configure} -DCMAKE_BUILD_TYPE=${CONFIG} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
else()
  # Debug and for one architecture, since all layers are built again here.
  run("configure" ${configure} -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CUDA_ARCHITECTURES=90 -DMXOPT_SOURCE_DIR=${ROOT} ${OPTIONS})
endif()

run("build" ${CMAKE_COMMAND} --build ${WORK}/build)
find_program(embed embed PATHS ${WORK}/build ${WORK}/build/Debug ${WORK}/build/Release NO_DEFAULT_PATH REQUIRED)
run("embed" ${embed})
