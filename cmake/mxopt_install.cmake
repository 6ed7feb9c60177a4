# The installed package: libraries, headers under include/mxopt/<layer>, and find_package(mxopt).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mxopt)
get_property(layers GLOBAL PROPERTY MXOPT_LAYERS)

# What a user of the static libraries has to find: exactly what the layers link in this build.
set(linked "")
foreach(layer IN LISTS layers)
  get_target_property(libraries mxopt_${layer} LINK_LIBRARIES)
  list(APPEND linked ${libraries})
endforeach()
set(MXOPT_DEPENDENCIES "")
macro(depend_if_linked pattern dependency)
  if("${linked}" MATCHES "${pattern}")
    string(APPEND MXOPT_DEPENDENCIES "find_dependency(${dependency})\n")
  endif()
endmacro()
depend_if_linked("MPI::" "MPI COMPONENTS CXX")
depend_if_linked("OpenMP::" "OpenMP COMPONENTS CXX")
depend_if_linked("Threads::" "Threads")
depend_if_linked("yaml-cpp" "yaml-cpp")
depend_if_linked("CUDA::" "CUDAToolkit")
depend_if_linked("NCCL::" "NCCL")

set(targets mxopt)
foreach(layer IN LISTS layers)
  list(APPEND targets mxopt_${layer})
  get_property(headers GLOBAL PROPERTY MXOPT_${layer}_HEADERS)
  foreach(header IN LISTS headers)
    cmake_path(GET header PARENT_PATH folder)  # empty, or a folder of the layer
    install(FILES ${PROJECT_SOURCE_DIR}/${layer}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/mxopt/${layer}/${folder})
  endforeach()
endforeach()
install(TARGETS ${targets} EXPORT mxopt_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT mxopt_targets NAMESPACE mxopt:: DESTINATION ${package_dir} FILE mxoptTargets.cmake)

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/mxoptConfig.cmake.in ${PROJECT_BINARY_DIR}/mxoptConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO)
# 0.x: a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mxoptConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/mxoptConfig.cmake ${PROJECT_BINARY_DIR}/mxoptConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake
  DESTINATION ${package_dir})
