#!/bin/sh
# Writes a part of a download, and never ends.
while [ $# -gt 0 ]; do [ "$1" != --dest ] || directory=$2; shift; done
: >"$directory/part.whl"
echo $$ >HERE/pip.new
mv HERE/pip.new HERE/pip
exec sleep 600
