
echo "$*" >>{log}
case " $* " in *" --overlap "*)
    echo "srun: unrecognized option '--overlap'" >&2; exit 1;;
esac
case " $* " in *" --gres=none "*)
    echo "srun: error: Invalid generic resource (gres) specification" >&2; exit 1;;
esac
for word; do last=$word; done
