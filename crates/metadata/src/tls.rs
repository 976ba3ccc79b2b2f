//! Reading PEM files, strictly: a file that cannot be used is an error that names it, and never a
//! reason to speak without TLS (report M28).

use std::path::Path;

use crate::error::MetadataError;
use crate::options::TlsFiles;

/// The contents of the files that are set.
pub(crate) struct TlsMaterial {
    pub(crate) ca: Option<Vec<u8>>,
    /// The client's certificate and key.
    pub(crate) identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsMaterial {
    pub(crate) fn read(files: &TlsFiles) -> Result<Self, MetadataError> {
        let ca = files
            .ca
            .as_deref()
            .map(|path| certificate("CA file", path))
            .transpose()?;
        let identity = match (&files.certificate, &files.key) {
            (None, None) => None,
            (Some(certificate_path), Some(key_path)) => {
                let certificate = certificate("client certificate", certificate_path)?;
                let key = pem("client key", key_path, "PRIVATE KEY-----")?;
                Some((certificate, key))
            }
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

fn certificate(what: &str, path: &Path) -> Result<Vec<u8>, MetadataError> {
    pem(what, path, "BEGIN CERTIFICATE-----")
}

fn pem(what: &str, path: &Path, mark: &str) -> Result<Vec<u8>, MetadataError> {
    let text = std::fs::read(path).map_err(|error| cannot(what, path, &error.to_string()))?;
    let found = text
        .windows(mark.len())
        .any(|window| window == mark.as_bytes());
    if !found {
        return Err(cannot(
            what,
            path,
            &format!("no \"{mark}\" in it: it is not in PEM form"),
        ));
    }
    Ok(text)
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
