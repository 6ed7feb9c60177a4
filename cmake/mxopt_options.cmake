# Every option of the build, and what AUTO resolves to on this machine.

option(MXOPT_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(MXOPT_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(MXOPT_BUILD_BENCH "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(MXOPT_INSTALL "Generate install rules" ${PROJECT_IS_TOP_LEVEL})
option(MXOPT_WERROR "Turn warnings into errors" OFF)
set(MXOPT_SANITIZE "" CACHE STRING "Sanitizers to build with: empty, address,undefined or thread")

# mxopt_feature(<NAME> <what it adds>) declares MXOPT_WITH_<NAME>: AUTO, ON or OFF.
function(mxopt_feature name doc)
  set(MXOPT_WITH_${name} AUTO CACHE STRING "${doc}: AUTO, ON or OFF")
  set_property(CACHE MXOPT_WITH_${name} PROPERTY STRINGS AUTO ON OFF)
  if(NOT MXOPT_WITH_${name} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR
      "MXOPT_WITH_${name}=${MXOPT_WITH_${name}}: allowed are AUTO, ON and OFF")
  endif()
endfunction()

# mxopt_resolve(<NAME> <found> <reason when not found>) sets MXOPT_HAVE_<NAME>.
function(mxopt_resolve name found reason)
  if(MXOPT_WITH_${name} STREQUAL "OFF")
    set(have OFF)
  elseif(found)
    set(have ON)
  elseif(MXOPT_WITH_${name} STREQUAL "ON")
    message(FATAL_ERROR "MXOPT_WITH_${name}=ON can not be met: ${reason}")
  else()
    set(have OFF)
    message(STATUS "mxopt: built without ${name}: ${reason}")
  endif()
  set(MXOPT_HAVE_${name} ${have} PARENT_SCOPE)
endfunction()

mxopt_feature(CUDA "Device code")
mxopt_feature(NCCL "NCCL transport")
mxopt_feature(MPI "Open MPI transport")
mxopt_feature(TORCH "The train_gpt example, with libtorch")

set(found OFF)
if(NOT MXOPT_WITH_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(found ON)
    enable_language(CUDA)
  endif()
endif()
mxopt_resolve(CUDA "${found}" "no CUDA compiler (nvcc) was found")

mxopt_resolve(NCCL OFF "this version has no NCCL transport")

set(found OFF)
if(NOT MXOPT_WITH_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS CXX)
  set(found ${MPI_CXX_FOUND})
endif()
mxopt_resolve(MPI "${found}" "find_package(MPI) found no MPI for C++")

find_package(OpenMP QUIET COMPONENTS CXX)
option(MXOPT_WITH_OPENMP "Thread the host kernels with OpenMP" ${OpenMP_CXX_FOUND})
if(MXOPT_WITH_OPENMP AND NOT OpenMP_CXX_FOUND)
  message(FATAL_ERROR "MXOPT_WITH_OPENMP=ON can not be met: the compiler has no OpenMP")
endif()
