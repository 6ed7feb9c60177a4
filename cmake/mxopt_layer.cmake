# mxopt_layer(<name> HEADERS ... PRIVATE_HEADERS ... DEVICE_HEADERS ... SOURCES ... KERNELS ... CUDA_SOURCES ... DEPENDS ... LIBRARIES ...)
#
# One layer = one folder = one static library mxopt::<name>. Its headers are reachable as
# "mxopt/<name>/x.h" through an include root of its own, and only by targets that link it; so an
# include that points upward or sideways does not compile.
#
#   HEADERS          installed to include/mxopt/<name>
#   PRIVATE_HEADERS  used inside the project only
#   DEVICE_HEADERS   headers with device code, for .cu files only
#   SOURCES          ordinary sources
#   KERNELS          sources with the loops over elements: vector flags are added
#   CUDA_SOURCES     sources that call the CUDA runtime (.cc) or have device code (.cu)
#   DEPENDS          lower layers
#   LIBRARIES        third-party libraries, private
function(mxopt_layer name)
  cmake_parse_arguments(arg "" "" "HEADERS;PRIVATE_HEADERS;DEVICE_HEADERS;SOURCES;KERNELS;CUDA_SOURCES;DEPENDS;LIBRARIES" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "mxopt_layer(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()

  set(root ${PROJECT_BINARY_DIR}/include_roots/${name})
  file(MAKE_DIRECTORY ${root}/mxopt)
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${root}/mxopt/${name} SYMBOLIC)

  add_library(mxopt_${name} STATIC
    ${arg_SOURCES} ${arg_KERNELS} ${arg_CUDA_SOURCES} ${arg_HEADERS} ${arg_PRIVATE_HEADERS} ${arg_DEVICE_HEADERS})
  add_library(mxopt::${name} ALIAS mxopt_${name})
  set_target_properties(mxopt_${name} PROPERTIES
    EXPORT_NAME ${name}
    POSITION_INDEPENDENT_CODE ON
    CXX_EXTENSIONS OFF)
  target_compile_features(mxopt_${name} PUBLIC cxx_std_20)
  target_include_directories(mxopt_${name} PUBLIC
    $<BUILD_INTERFACE:${root}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(mxopt_${name}
    PUBLIC ${arg_DEPENDS}
    PRIVATE $<BUILD_INTERFACE:mxopt_build_flags> ${arg_LIBRARIES})

  if(arg_KERNELS)
    # -fno-math-errno and -fno-trapping-math change no value; without them sqrt and comparisons
    # are not vectorised.
    set_source_files_properties(${arg_KERNELS} PROPERTIES
      COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math")
    if(MXOPT_WITH_OPENMP)
      target_link_libraries(mxopt_${name} PRIVATE OpenMP::OpenMP_CXX)
    endif()
  endif()

  if(arg_CUDA_SOURCES)
    # The static runtime: a program that embeds the library needs no other library of the toolkit.
    target_link_libraries(mxopt_${name} PRIVATE CUDA::cudart_static)
  endif()

  set_property(GLOBAL APPEND PROPERTY MXOPT_LAYERS ${name})
  set_property(GLOBAL PROPERTY MXOPT_${name}_HEADERS ${arg_HEADERS})
  set_property(GLOBAL PROPERTY MXOPT_${name}_ALL_HEADERS ${arg_HEADERS} ${arg_PRIVATE_HEADERS})
endfunction()
