{{/* All replicas: for each a ConfigMap and a RayCluster of the same name, as Helm and the upgrade Job make them. */}}
{{- define "outrider.replicas" -}}
{{- range $index := until (int .Values.replicas) }}
{{- $values := deepCopy $.Values }}
{{- if lt $index (int $.Values.upgrade.partition) }}
{{- $values = mergeOverwrite $values (deepCopy $.Values.upgrade.previous) }}
{{- end }}
{{- $root := dict "Values" $values "Release" $.Release "Chart" $.Chart "index" $index }}
{{- $config := include "outrider.config.controller" $root }}
{{- /* KubeRay does not change pods that run: another spec is another RayCluster, under another name. */}}
{{- $spec := include "outrider.rayClusterSpec" (dict "root" $root "configMap" "") }}
{{- $name := printf "%s-%d-%s" (include "outrider.fullname" $) $index (printf "%s%s" ($spec | fromYaml | toJson) $config | sha256sum | trunc 8) }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels: {{- include "outrider.labels" (dict "root" $ "component" "controller") | nindent 4 }}
data:
  config.yaml: | {{- $config | nindent 4 }}
---
apiVersion: ray.io/v1
kind: RayCluster
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels: {{- include "outrider.labels" (dict "root" $ "component" "controller") | nindent 4 }}
spec:
  # An upgrade suspends it, a rollback resumes it.
  suspend: false
  {{- include "outrider.rayClusterSpec" (dict "root" $root "configMap" $name) | nindent 2 }}
{{- end }}
{{- end }}
