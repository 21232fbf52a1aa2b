# The versions of the packages @PACKAGES@. In a record of dpkg, the version is at most twelve lines
# below the name.
if [ -r /var/lib/dpkg/status ]; then
    printf 'packages=dpkg\n'
    grep -asE -A12 '^Package: (@PATTERN@)$' /var/lib/dpkg/status
elif [ -r /lib/apk/db/installed ]; then
    printf 'packages=apk\n'
    grep -asE -A1 '^P:(@PATTERN@)$' /lib/apk/db/installed
elif command -v rpm >/dev/null; then
    printf 'packages=rpm\n'
    timeout -k 1 4 rpm -q --qf '%{NAME} %{VERSION}-%{RELEASE}\n' @PACKAGES@ 2>/dev/null
fi
printf 'packages=end\n'
