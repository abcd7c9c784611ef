//! The two macros that read the tables of this module: one entry defines a struct, its JSON and its
//! documentation.
//!
//! An entry is `"name" => Struct { fields }`, each field with its doc comment, in one of three forms:
//! `field: Type` is always in the JSON, `field?: Type` is left out while it has its default value, and `..field: Type`
//! puts the fields of `Type` beside the others. A `#[serde(alias = "…")]` keeps a field's earlier name readable.

/// Defines structs: `"title" => Name { fields }`, where the title is the heading in docs/reference/events.md.
macro_rules! records {
    ($( $(#[doc = $doc:literal])+ $title:literal => $name:ident { $($fields:tt)* } )*) => {
        $( records! { @field [$($doc)+] $title $name [] [] $($fields)* } )*
    };
    (@field $docs:tt $title:literal $name:ident [$($done:tt)*] [$($row:tt)*]
        $(#[doc = $doc:literal])+ $(#[serde($($serde:tt)*)])? $field:ident: $type:ty, $($rest:tt)*
    ) => {
        records! { @field $docs $title $name
            [$($done)* $(#[doc = $doc])+ $(#[serde($($serde)*)])? pub $field: $type,]
            [$($row)* $crate::event_data::schema::always::<$type>(stringify!($field), concat!($($doc),+)),]
            $($rest)*
        }
    };
    (@field $docs:tt $title:literal $name:ident [$($done:tt)*] [$($row:tt)*]
        $(#[doc = $doc:literal])+ $(#[serde($($serde:tt)*)])? $field:ident?: $type:ty, $($rest:tt)*
    ) => {
        records! { @field $docs $title $name
            [$($done)* $(#[doc = $doc])+ $(#[serde($($serde)*)])?
                #[serde(default, skip_serializing_if = "crate::event_data::is_default")] pub $field: $type,]
            [$($row)* $crate::event_data::schema::optional::<$type>(stringify!($field), concat!($($doc),+)),]
            $($rest)*
        }
    };
    (@field $docs:tt $title:literal $name:ident [$($done:tt)*] [$($row:tt)*]
        $(#[doc = $doc:literal])+ ..$field:ident: $type:ty, $($rest:tt)*
    ) => {
        records! { @field $docs $title $name
            [$($done)* $(#[doc = $doc])+ #[serde(flatten)] pub $field: $type,]
            [$($row)* $crate::event_data::schema::beside::<$type>(),]
            $($rest)*
        }
    };
    (@field [$($doc:literal)+] $title:literal $name:ident [$($done:tt)*] [$($row:tt)*]) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            $($done)*
        }

        #[cfg(test)]
        impl $crate::event_data::schema::JsonForm for $name {
            fn form() -> String {
                $crate::event_data::schema::link($title)
            }

            fn section() -> $crate::event_data::schema::Section {
                $crate::event_data::schema::Section {
                    title: $title,
                    meaning: concat!($($doc),+).trim(),
                    fields: [$($row)* Vec::new()].concat(),
                }
            }
        }
    };
}

/// Defines the kinds of events, `"type" => Name { fields }`, and [`EventData`](crate::EventData) over all of them.
/// Earlier names of a type follow it: `"type" | "earlier" => …`.
macro_rules! kinds {
    ($( $(#[doc = $doc:literal])+ $kind:literal $(| $earlier:literal)* => $name:ident { $($fields:tt)* } )*) => {
        records! { $( $(#[doc = $doc])+ $kind => $name { $($fields)* } )* }

        /// The data of an event, by its kind.
        #[derive(Debug, Clone, PartialEq)]
        pub enum EventData {
            $( $(#[doc = $doc])+ $name($name), )*
        }

        impl EventData {
            /// The `type` of such an event.
            pub fn kind(&self) -> &'static str {
                match self {
                    $( Self::$name(_) => $kind, )*
                }
            }

            /// Parses the data of an event of type `kind`; none if this version does not know the type, or if
            /// the data does not match it.
            pub(super) fn read(kind: &str, data: &serde_json::Value) -> Option<Self> {
                match kind {
                    $( $kind $(| $earlier)* => serde::Deserialize::deserialize(data).ok().map(Self::$name), )*
                    _ => None,
                }
            }

            pub(super) fn write(&self) -> Result<serde_json::Value, serde_json::Error> {
                match self {
                    $( Self::$name(data) => serde_json::to_value(data), )*
                }
            }
        }

        $(
            impl super::EventKind for $name {
                const NAMES: &[&str] = &[$kind $(, $earlier)*];
            }

            impl From<$name> for EventData {
                fn from(data: $name) -> Self {
                    Self::$name(data)
                }
            }
        )*

        #[cfg(test)]
        pub(super) fn sections() -> Vec<(super::schema::Section, &'static [&'static str])> {
            vec![$( (<$name as super::schema::JsonForm>::section(), <$name as super::EventKind>::NAMES), )*]
        }
    };
}

/// Defines enums whose values are words in JSON. A word of a newer version is read as `Other`.
macro_rules! words {
    ($( $(#[doc = $doc:literal])+ $name:ident { $( $(#[doc = $word_doc:literal])+ $word:literal => $variant:ident, )+ } )*) => {
        $(
            $(#[doc = $doc])+
            #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
            #[serde(from = "String", into = "String")]
            pub enum $name {
                $( $(#[doc = $word_doc])+ $variant, )+
                /// A word of a newer version.
                Other(String),
            }

            impl From<String> for $name {
                fn from(word: String) -> Self {
                    match word.as_str() {
                        $( $word => Self::$variant, )+
                        _ => Self::Other(word),
                    }
                }
            }

            impl From<$name> for String {
                fn from(value: $name) -> String {
                    match value {
                        $( $name::$variant => $word.to_owned(), )+
                        $name::Other(word) => word,
                    }
                }
            }

            #[cfg(test)]
            impl $crate::event_data::schema::JsonForm for $name {
                fn form() -> String {
                    [$(concat!("`\"", $word, "\"`")),+].join(" or ")
                }
            }
        )*
    };
}
