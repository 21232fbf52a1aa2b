# The first lines of every script on a node.
LC_ALL=C
LANG=C
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
export LC_ALL LANG PATH
unset LANGUAGE CDPATH ENV BASH_ENV GREP_OPTIONS POSIXLY_CORRECT IFS
umask 022
cd /
