# Finds libtorch: a packaged one (headers and libraries where the compiler looks, or below CMAKE_PREFIX_PATH or
# Torch_ROOT), else the PyTorch that python3 would import. Sets TORCH_PROBLEM, empty when the target
# mxopt_torch can be linked. The target's property MXOPT_DEVICES is host, or cuda where it computes on GPUs too.
#
# Why not find_package(Torch): its configuration ends the whole configure run when a dependency of a CUDA build is
# missing (protobuf, nvcc). The trainer needs the headers and two libraries, on GPUs four, and no header of CUDA.
function(mxopt_find_torch)
  set(TORCH_PROBLEM "" PARENT_SCOPE)
  set(hints ${Torch_ROOT} $ENV{Torch_ROOT})
  find_path(MXOPT_TORCH_INCLUDE torch/csrc/autograd/custom_function.h HINTS ${hints} PATH_SUFFIXES include)
  find_library(MXOPT_TORCH_CPU torch_cpu HINTS ${hints} PATH_SUFFIXES lib)

  if(NOT MXOPT_TORCH_INCLUDE OR NOT MXOPT_TORCH_CPU)
    find_package(Python3 QUIET COMPONENTS Interpreter)
    set(prefix "")
    if(Python3_Interpreter_FOUND)
      # find_spec says where the package is without importing it, which would load its CUDA libraries.
      execute_process(
        COMMAND ${Python3_EXECUTABLE} -c
          "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
        OUTPUT_VARIABLE prefix ERROR_QUIET)
    endif()
    if(prefix)
      unset(MXOPT_TORCH_INCLUDE CACHE)
      unset(MXOPT_TORCH_CPU CACHE)
      find_path(MXOPT_TORCH_INCLUDE torch/csrc/autograd/custom_function.h PATHS ${prefix}/include NO_DEFAULT_PATH)
      find_library(MXOPT_TORCH_CPU torch_cpu PATHS ${prefix}/lib NO_DEFAULT_PATH)
    endif()
  endif()
  if(NOT MXOPT_TORCH_INCLUDE OR NOT MXOPT_TORCH_CPU)
    set(TORCH_PROBLEM "no libtorch was found: neither headers and libtorch_cpu on the search paths nor a PyTorch that python3 can import" PARENT_SCOPE)
    return()
  endif()

  get_filename_component(libraries ${MXOPT_TORCH_CPU} DIRECTORY)
  find_library(MXOPT_TORCH_C10 c10 HINTS ${libraries} NO_DEFAULT_PATH)
  if(NOT MXOPT_TORCH_C10)
    set(TORCH_PROBLEM "libc10 is missing beside ${MXOPT_TORCH_CPU}" PARENT_SCOPE)
    return()
  endif()

  # The standard library's ABI that libtorch was built with is written in its package configuration.
  set(abi 1)
  foreach(config ${libraries}/cmake/Torch ${libraries}/../share/cmake/Torch)
    if(EXISTS ${config}/TorchConfig.cmake)
      file(STRINGS ${config}/TorchConfig.cmake lines REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
      if(lines MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
        set(abi ${CMAKE_MATCH_1})
      endif()
    endif()
  endforeach()
  if(NOT abi EQUAL 1)
    set(TORCH_PROBLEM "${MXOPT_TORCH_CPU} was built with the old ABI of the C++ library (_GLIBCXX_USE_CXX11_ABI=0), mxopt is not" PARENT_SCOPE)
    return()
  endif()

  # Without the CUDA backend libtorch's CUDA part would only take time to load.
  set(torch_libraries ${MXOPT_TORCH_CPU} ${MXOPT_TORCH_C10})
  set(kind host)
  set(devices "the host")
  if(MXOPT_HAVE_CUDA)
    find_library(MXOPT_TORCH_CUDA torch_cuda HINTS ${libraries} NO_DEFAULT_PATH)
    find_library(MXOPT_TORCH_C10_CUDA c10_cuda HINTS ${libraries} NO_DEFAULT_PATH)
    # Since 2.4 events tell the time between them through headers that need no header of CUDA.
    file(STRINGS ${MXOPT_TORCH_INCLUDE}/c10/core/Event.h event_times REGEX "elapsedTime")
    if(NOT MXOPT_TORCH_CUDA OR NOT MXOPT_TORCH_C10_CUDA)
      string(APPEND devices ": this libtorch has no CUDA")
    elseif(NOT event_times)
      string(APPEND devices ": for GPUs libtorch 2.4 or newer is needed")
    else()
      list(APPEND torch_libraries ${MXOPT_TORCH_CUDA} ${MXOPT_TORCH_C10_CUDA})
      set(devices "the host and GPUs")
      set(kind cuda)
    endif()
  endif()

  # IMPORTED, so that these headers give no warnings. libtorch itself is left out: in a CUDA build it does no more than
  # load all of CUDA. Operators register themselves when their library is loaded, so it must stay linked.
  add_library(mxopt_torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(mxopt_torch PROPERTIES MXOPT_DEVICES ${kind})
  target_include_directories(mxopt_torch INTERFACE
    ${MXOPT_TORCH_INCLUDE} ${MXOPT_TORCH_INCLUDE}/torch/csrc/api/include)
  target_link_libraries(mxopt_torch INTERFACE
    -Wl,--no-as-needed ${torch_libraries} -Wl,--as-needed)
  message(STATUS "mxopt: train_gpt uses ${MXOPT_TORCH_CPU} and computes on ${devices}")
endfunction()
