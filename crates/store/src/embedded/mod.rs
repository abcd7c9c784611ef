//! The store in one data directory: SQLite and files.

mod records;

pub use records::EmbeddedRecords;
