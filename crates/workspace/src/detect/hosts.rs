//! The host names of package registries.

use std::collections::BTreeSet;

pub const CRATES: &[&str] = &["index.crates.io:443", "static.crates.io:443", "crates.io:443"];
pub const NPM: &[&str] = &["registry.npmjs.org:443", "registry.yarnpkg.com:443"];
pub const PYPI: &[&str] = &["pypi.org:443", "files.pythonhosted.org:443"];
pub const GO_PROXY: &[&str] = &["proxy.golang.org:443", "sum.golang.org:443"];
pub const GEMS: &[&str] = &["rubygems.org:443", "index.rubygems.org:443"];
pub const PACKAGIST: &[&str] = &["repo.packagist.org:443", "api.github.com:443", "codeload.github.com:443"];
pub const HEX: &[&str] = &["repo.hex.pm:443", "hex.pm:443", "builds.hex.pm:443"];
pub const MAVEN_CENTRAL: &[&str] =
    &["repo.maven.apache.org:443", "repo1.maven.org:443", "plugins.gradle.org:443"];

/// The hosts from which uv downloads Python. They are no registry: only the step that installs Python, which runs
/// no code of a repository, may reach them.
pub const PYTHON_BUILDS: &[&str] = &[
    "github.com:443",
    "release-assets.githubusercontent.com:443",
    "objects.githubusercontent.com:443",
    "releases.astral.sh:443",
];

/// Host names of all registries that manifests and lockfiles may need.
pub fn registries() -> BTreeSet<&'static str> {
    [CRATES, NPM, PYPI, GO_PROXY, GEMS, PACKAGIST, HEX, MAVEN_CENTRAL].concat().into_iter().collect()
}
