# Finds yaml-cpp and sets MXOPT_YAML_CPP_TARGET. Version 0.7 exports the target yaml-cpp, newer ones yaml-cpp::yaml-cpp.

find_package(yaml-cpp REQUIRED)
if(TARGET yaml-cpp::yaml-cpp)
  set(MXOPT_YAML_CPP_TARGET yaml-cpp::yaml-cpp)
elseif(TARGET yaml-cpp)
  set(MXOPT_YAML_CPP_TARGET yaml-cpp)
else()
  message(FATAL_ERROR "yaml-cpp in ${yaml-cpp_DIR} exports neither yaml-cpp::yaml-cpp nor yaml-cpp")
endif()
