//! Compares `contract.rs` with the API descriptions in the hypervisors' sources.
//!
//! They are not part of this repository. Set `PAL_FIRECRACKER_OPENAPI` and `PAL_CLOUD_HYPERVISOR_OPENAPI` to
//! their paths.

use testkit::skip::skip;
use yaml_rust2::{Yaml, YamlLoader};

use crate::contract::{CLOUD_HYPERVISOR, FIRECRACKER, ObjectShape, Operation, ValueKind};

struct Description {
    root: Yaml,
    /// The path of its shapes.
    shapes: &'static [&'static str],
}

impl Description {
    fn read(variable: &str, shapes: &'static [&'static str]) -> Option<Self> {
        let path = std::env::var_os(variable)?;
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{variable}: {error}"));
        let root =
            YamlLoader::load_from_str(&text).unwrap_or_else(|error| panic!("{variable}: {error}")).remove(0);
        Some(Self { root, shapes })
    }

    fn shape(&self, name: &str) -> &Yaml {
        let found = self.shapes.iter().fold(&self.root, |at, step| &at[*step]);
        let shape = &found[name];
        assert!(!shape.is_badvalue(), "it has no {name}");
        shape
    }

    /// The name at the end of a reference.
    fn referred(value: &Yaml) -> Option<&str> {
        value["$ref"].as_str().and_then(|reference| reference.rsplit('/').next())
    }

    fn agrees_on(&self, shape: &ObjectShape) {
        let theirs = self.shape(shape.name);
        let mut required: Vec<&str> =
            theirs["required"].as_vec().into_iter().flatten().filter_map(Yaml::as_str).collect();
        let mut ours = shape.required.to_vec();
        required.sort_unstable();
        ours.sort_unstable();
        assert_eq!(required, ours, "what must be said of {}", shape.name);
        for (field, kind) in shape.fields {
            let value = &theirs["properties"][*field];
            assert!(!value.is_badvalue(), "{} has no {field}", shape.name);
            self.agrees_on_kind(&format!("{}.{field}", shape.name), value, *kind);
        }
    }

    fn agrees_on_kind(&self, at: &str, value: &Yaml, kind: ValueKind) {
        let is = |word: &str| assert_eq!(value["type"].as_str(), Some(word), "{at}");
        match kind {
            ValueKind::Text => is("string"),
            ValueKind::Whole => is("integer"),
            ValueKind::Truth => is("boolean"),
            ValueKind::OneOf(words) => {
                let value = Self::referred(value).map_or(value, |name| self.shape(name));
                let theirs: Vec<&str> =
                    value["enum"].as_vec().into_iter().flatten().filter_map(Yaml::as_str).collect();
                assert_eq!(theirs, words, "{at}");
            }
            ValueKind::Of(shape) => {
                assert_eq!(Self::referred(value), Some(shape.name), "{at}");
                self.agrees_on(shape);
            }
            ValueKind::Many(shape) => {
                is("array");
                assert_eq!(Self::referred(&value["items"]), Some(shape.name), "{at}");
                self.agrees_on(shape);
            }
        }
    }

    fn agrees(&self, operations: &[Operation]) {
        for (method, path, shape) in operations {
            let operation = &self.root["paths"][*path][method.to_lowercase().as_str()];
            assert!(!operation.is_badvalue(), "it has no {method} {path}");
            // In Swagger 2 the body is a parameter, in OpenAPI 3 it is a field of its own.
            let parameter = operation["parameters"]
                .as_vec()
                .into_iter()
                .flatten()
                .find(|parameter| parameter["in"].as_str() == Some("body"));
            let body = parameter
                .map_or(&operation["requestBody"]["content"]["application/json"]["schema"], |parameter| {
                    &parameter["schema"]
                });
            assert_eq!(Self::referred(body), shape.map(|shape| shape.name), "{method} {path}");
            shape.iter().for_each(|shape| self.agrees_on(shape));
        }
    }
}

#[test]
fn what_is_written_down_of_firecracker_is_what_it_publishes() {
    match Description::read("PAL_FIRECRACKER_OPENAPI", &["definitions"]) {
        Some(description) => description.agrees(FIRECRACKER),
        None => skip("against firecracker's description"),
    }
}

#[test]
fn what_is_written_down_of_cloud_hypervisor_is_what_it_publishes() {
    match Description::read("PAL_CLOUD_HYPERVISOR_OPENAPI", &["components", "schemas"]) {
        Some(description) => description.agrees(CLOUD_HYPERVISOR),
        None => skip("against cloud-hypervisor's description"),
    }
}
