//! Reading PEM files, strictly: a file that cannot be used is an error that names it, and never a
//! reason to speak without TLS (report M28).
//!
//! The stores' libraries get what has been checked here. On their own some of them take a file
//! without a certificate for an empty list, and none says which file it was.

use std::path::Path;

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::error::MetadataError;
use crate::options::TlsFiles;

/// The contents of the files that are set, all of which can be used.
pub(crate) struct TlsMaterial {
    pub(crate) ca: Option<Pem<RootCertStore>>,
    /// The client's certificate and key.
    pub(crate) identity: Option<Identity>,
}

/// A file as it is, for libraries that take PEM, and what is in it.
pub(crate) struct Pem<T> {
    pub(crate) text: Vec<u8>,
    pub(crate) parsed: T,
}

/// A client's certificate and its key, which belong together.
pub(crate) struct Identity {
    pub(crate) certificates: Pem<Vec<CertificateDer<'static>>>,
    pub(crate) key: Pem<PrivateKeyDer<'static>>,
}

impl TlsMaterial {
    pub(crate) fn read(files: &TlsFiles) -> Result<Self, MetadataError> {
        let ca = files.ca.as_deref().map(authorities).transpose()?;
        let identity = match (&files.certificate, &files.key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some(Identity::read(certificate, key)?),
            (Some(path), None) => {
                return Err(cannot(
                    "client certificate",
                    path,
                    "it has no key beside it",
                ));
            }
            (None, Some(path)) => {
                return Err(cannot(
                    "client key",
                    path,
                    "it has no certificate beside it",
                ));
            }
        };
        Ok(Self { ca, identity })
    }
}

impl Identity {
    fn read(certificate: &Path, key: &Path) -> Result<Self, MetadataError> {
        let certificates = certificates("client certificate", certificate)?;
        let what = "client key";
        let text = read(what, key)?;
        // The library's words hold no part of the key.
        let parsed = PrivateKeyDer::from_pem_slice(&text)
            .map_err(|error| cannot(what, key, &format!("no private key in PEM form: {error}")))?;
        let pair =
            CertifiedKey::from_der(certificates.parsed.clone(), parsed.clone_key(), &provider());
        pair.map_err(|error| {
            let reason = format!("it does not go with {}: {error}", certificate.display());
            cannot(what, key, &reason)
        })?;
        Ok(Self {
            certificates,
            key: Pem { text, parsed },
        })
    }
}

/// The cryptography of every store that leaves the choice to us.
pub(crate) fn provider() -> CryptoProvider {
    ring::default_provider()
}

/// A configuration for HTTP. Without a CA file, the system's authorities count.
#[cfg(feature = "http")]
pub(crate) fn client_config(files: &TlsFiles) -> Result<rustls::ClientConfig, MetadataError> {
    let material = TlsMaterial::read(files)?;
    let roots = match material.ca {
        Some(ca) => ca.parsed,
        None => system_authorities()?,
    };
    let config = config_builder()?.with_root_certificates(roots);
    match material.identity {
        None => Ok(config.with_no_client_auth()),
        Some(own) => config
            .with_client_auth_cert(own.certificates.parsed, own.key.parsed)
            .map_err(|error| unusable(&error.to_string())),
    }
}

/// A configuration that trusts nobody, for clients that are never to speak TLS.
#[cfg(feature = "http")]
pub(crate) fn no_client_config() -> Result<rustls::ClientConfig, MetadataError> {
    let config = config_builder()?.with_root_certificates(RootCertStore::empty());
    Ok(config.with_no_client_auth())
}

#[cfg(feature = "http")]
fn config_builder()
-> Result<rustls::ConfigBuilder<rustls::ClientConfig, rustls::WantsVerifier>, MetadataError> {
    rustls::ClientConfig::builder_with_provider(provider().into())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(&error.to_string()))
}

#[cfg(feature = "http")]
fn system_authorities() -> Result<RootCertStore, MetadataError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Systems ship certificates that are of no use here; the others are.
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added > 0 {
        return Ok(roots);
    }
    let causes: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
    let reason = if causes.is_empty() {
        "the system has none".to_owned()
    } else {
        causes.join("; ")
    };
    Err(unusable(&format!(
        "no certificate authority: {reason}; name a CA file"
    )))
}

#[cfg(feature = "http")]
fn unusable(reason: &str) -> MetadataError {
    MetadataError::Setting {
        name: "TLS".into(),
        reason: reason.into(),
    }
}

fn authorities(path: &Path) -> Result<Pem<RootCertStore>, MetadataError> {
    let what = "CA file";
    let Pem { text, parsed } = certificates(what, path)?;
    let mut roots = RootCertStore::empty();
    for certificate in parsed {
        roots
            .add(certificate)
            .map_err(|error| cannot(what, path, &error.to_string()))?;
    }
    Ok(Pem {
        text,
        parsed: roots,
    })
}

fn certificates(
    what: &str,
    path: &Path,
) -> Result<Pem<Vec<CertificateDer<'static>>>, MetadataError> {
    let text = read(what, path)?;
    let parsed = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| cannot(what, path, &format!("not in PEM form: {error}")))?;
    if parsed.is_empty() {
        return Err(cannot(what, path, "no certificate in PEM form in it"));
    }
    Ok(Pem { text, parsed })
}

fn read(what: &str, path: &Path) -> Result<Vec<u8>, MetadataError> {
    std::fs::read(path).map_err(|error| cannot(what, path, &error.to_string()))
}

fn cannot(what: &str, path: &Path, reason: &str) -> MetadataError {
    MetadataError::Setting {
        name: what.into(),
        reason: format!("{}: {reason}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn m28_a_file_that_cannot_be_used_is_named_with_the_cause() {
        let dir = tempfile::tempdir().expect("a directory");
        let garbled = dir.path().join("garbled.pem");
        std::fs::write(&garbled, "no PEM").expect("written");
        let missing = PathBuf::from("/nonexistent/ca.pem");
        for (files, path) in [
            (
                TlsFiles {
                    ca: Some(missing.clone()),
                    ..TlsFiles::default()
                },
                &missing,
            ),
            (
                TlsFiles {
                    ca: Some(garbled.clone()),
                    ..TlsFiles::default()
                },
                &garbled,
            ),
            (
                TlsFiles {
                    key: Some(missing.clone()),
                    ..TlsFiles::default()
                },
                &missing,
            ),
            (
                TlsFiles {
                    certificate: Some(missing.clone()),
                    ..TlsFiles::default()
                },
                &missing,
            ),
        ] {
            let Err(error) = TlsMaterial::read(&files) else {
                panic!("{files:?} must be refused");
            };
            let error = error.to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
    }
}
